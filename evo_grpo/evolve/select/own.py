"""A selection of the user's own: how settings name it, and the check of what it plans."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, cast, final

from evo_grpo.errors import ConfigError, RunFailedError, ShapeError
from evo_grpo.evolve.kinds import OWN, OWN_PATTERN
from evo_grpo.evolve.select.protocol import Offspring, Selector
from evo_grpo.schema.group import Group, PlainMapping, setting
from evo_grpo.types import Position, Score
from evo_grpo.validation import is_whole, shown

if TYPE_CHECKING:
    import numpy as np


@final
class OwnSelection(Group):
    """A class of your own with the method `plan` of `evo_grpo.Selector`, by its name.

    Its module is imported when a run is prepared, not when settings are read.
    """

    tag: ClassVar[str] = OWN

    kind: str = setting(
        meaning='Module and class, for instance "my_selection:MySelector".', pattern=OWN_PATTERN
    )
    args: PlainMapping = setting(meaning="Keyword arguments of the class.", factory=dict)


@final
class CheckedSelector:
    """A selection of the user's own, whose plans are checked before an adapter is overwritten.

    Args:
        selector: Any object with a method `plan`.
    """

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self.name = type(selector).__name__

    def __repr__(self) -> str:
        """Show whose plans are checked."""
        return f"CheckedSelector({self.selector!r})"

    def plan(
        self, histories: Sequence[Sequence[Score]], places: int, rng: "np.random.Generator"
    ) -> tuple[Offspring, ...]:
        """Plan the next round; see `Selector`.

        Raises:
            ConfigError: The selection raised an error.
            ShapeError: It returned something that is no plan, or a plan that loses agents.
            RunFailedError: It says that every agent has failed.
        """
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
    """Return a plan that can be carried out, by rising position; refuse any other."""
    entries = list(cast("Iterable[object]", plan)) if isinstance(plan, Iterable) else [plan]
    wrong = [entry for entry in entries if not isinstance(entry, Offspring)]
    if wrong or not isinstance(plan, Iterable):
        raise ShapeError(
            f"{name}.plan: expected a sequence of evo_grpo.Offspring, got {shown(plan)}; return "
            "one for each agent that goes on"
        )
    offspring = cast("list[Offspring]", entries)
    numbers = [number for one in offspring for number in (one.position, one.parent)]
    if not all(is_whole(number) and 0 <= number < size for number in numbers):
        raise ShapeError(
            f"{name}.plan: expected positions and parents among 0..{size - 1}, the places of "
            f"`histories`, got {shown(numbers)}"
        )
    filled = [one.position for one in offspring]
    if not filled or len(filled) > places or any(a >= b for a, b in pairwise(filled)):
        raise ShapeError(
            f"{name}.plan: expected 1 to {places} offspring, one per place, each at another "
            f"position, by rising position, got positions {shown(filled)}"
        )
    survivors = {one.position for one in offspring if one.parent == one.position}
    for one in offspring:
        if one.parent not in survivors:
            raise ShapeError(
                f"{name}.plan: position {one.position} copies position {one.parent}, expected one "
                f"that survives in place, with itself as parent: {shown(sorted(survivors))}; an "
                "agent that is overwritten or leaves is lost before it can be copied"
            )
    return tuple(
        Offspring(Position(int(one.position)), Position(int(one.parent)), bool(one.elite))
        for one in offspring
    )
