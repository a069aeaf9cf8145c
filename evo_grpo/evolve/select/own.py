"""A user-defined selection, whose plans are checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast, final

from evo_grpo.errors import ConfigError, RunFailedError, ShapeError
from evo_grpo.evolve.generation import check_plan
from evo_grpo.evolve.select.protocol import Offspring, Selector
from evo_grpo.schema.validation import shown
from evo_grpo.types import Position, Score

if TYPE_CHECKING:
    import numpy as np


@final
class CheckedSelector:
    """Checks the plans of a user-defined `selector` before an adapter is overwritten."""

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self.name = type(selector).__name__

    def __repr__(self) -> str:
        return f"CheckedSelector({self.selector!r})"

    def plan(
        self, histories: Sequence[Sequence[Score]], places: int, rng: np.random.Generator
    ) -> tuple[Offspring, ...]:
        """Plan the next round, and check the plan."""
        try:
            plan: object = self.selector.plan(histories, places, rng)
        except RunFailedError:
            raise
        except Exception as error:  # the class is the user's code and may raise anything
            raise ConfigError(
                f"evolve.selection: {self.name}.plan raised {type(error).__name__}: {error}; it is "
                "called with the scores of each agent, the places of the next round and a generator"
            ) from error
        return _checked(self.name, plan, len(histories), places)


def _checked(name: str, plan: object, size: int, places: int) -> tuple[Offspring, ...]:
    entries = list(cast("Iterable[object]", plan)) if isinstance(plan, Iterable) else [plan]
    wrong = [entry for entry in entries if not isinstance(entry, Offspring)]
    if wrong or not isinstance(plan, Iterable):
        raise ShapeError(
            f"{name}.plan: expected a sequence of evo_grpo.Offspring, got {shown(plan)}; return "
            "one for each agent that goes on"
        )
    offspring = cast("list[Offspring]", entries)
    check_plan(f"{name}.plan", offspring, size, places)
    return tuple(
        Offspring(Position(int(one.position)), Position(int(one.parent)), bool(one.elite))
        for one in offspring
    )
