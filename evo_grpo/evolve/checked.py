"""Checks the plans and hyperparameters of user-defined strategies before they take effect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, final

from evo_grpo.errors import ConfigError, RunFailedError, ShapeError
from evo_grpo.evolve.generation import check_plan
from evo_grpo.evolve.protocols import Candidate, Changes, Explorer, Offspring, Selector
from evo_grpo.evolve.start import with_values
from evo_grpo.schema.hparams import Hparams, Value
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.schema.validation import is_whole, shown
from evo_grpo.types import Position, Score

if TYPE_CHECKING:
    import numpy as np


@final
class CheckedSelector:
    """A selector that checks the plans of a user-defined `selector` before agents are copied."""

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self.name = type(selector).__name__

    def __repr__(self) -> str:
        return f"CheckedSelector({self.selector!r})"

    def plan(
        self, histories: Sequence[Sequence[Score]], places: int, rng: np.random.Generator
    ) -> tuple[Offspring, ...]:
        """Let `selector` plan the next round, and check its plan."""
        try:
            plan: object = self.selector.plan(histories, places, rng)
        except RunFailedError:
            raise
        except Exception as error:  # the class is the user's code and may raise anything
            raise ConfigError(
                f"evolve.selection: {self.name}.plan raised {type(error).__name__}: {error}; it is "
                "called with the scores of each agent, the places of the next round and a generator"
            ) from error
        return _checked_plan(self.name, plan, len(histories), places)


def _checked_plan(name: str, plan: object, size: int, places: int) -> tuple[Offspring, ...]:
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
        Offspring(Position(int(child.position)), Position(int(child.parent)), bool(child.elite))
        for child in offspring
    )


@final
class CheckedExplorer:
    """An explorer that checks the values of a user-defined `explorer` before agents train."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer
        self.name = type(explorer).__name__

    def __repr__(self) -> str:
        return f"CheckedExplorer({self.explorer!r})"

    def explore(
        self, candidate: Candidate, hp_config: HyperparameterConfig, rng: np.random.Generator
    ) -> tuple[Hparams, Changes]:
        """Let `explorer` vary an agent's hyperparameters, and check its result."""
        try:
            result: object = self.explorer.explore(candidate, hp_config, rng)
        except Exception as error:  # the class is the user's code and may raise anything
            raise ConfigError(
                f"evolve.exploration: {self.name}.explore raised {type(error).__name__}: {error}; "
                "it is called with an evo_grpo.Candidate, the ranges and a generator"
            ) from error
        return _checked_values(self.name, result, candidate.hparams, hp_config)


def _checked_values(
    name: str, result: object, before: Hparams, hp_config: HyperparameterConfig
) -> tuple[Hparams, Changes]:
    """Return `result`, (hparams, changes), if the changes lead from `before` to the hparams."""
    pair = cast("tuple[object, ...]", result) if isinstance(result, tuple) else ()
    if len(pair) != 2 or not isinstance(pair[0], Hparams) or not isinstance(pair[1], Mapping):
        raise ShapeError(
            f"{name}.explore: expected (hparams, changes), an Hparams and a mapping of names to "
            f"(old, new), got {shown(result)}"
        )
    hparams, items = pair[0], cast("Mapping[str, Any]", pair[1])
    try:
        changes = {key: (_plain(old), _plain(new)) for key, (old, new) in items.items()}
        with_values(before, {key: old for key, (old, _) in changes.items()})  # checks their types
        expected = with_values(before, {key: new for key, (_, new) in changes.items()})
    except (TypeError, ValueError) as error:
        raise ShapeError(
            f"{name}.explore: expected changes such as {{'lr': (old, new)}}, got {shown(items)}: "
            f"{error}"
        ) from error
    for changed, (_, value) in changes.items():
        parameter = hp_config[changed] if changed in hp_config.names() else None
        if parameter is not None and parameter.choices is not None and not parameter.allows(value):
            raise ShapeError(
                f"{name}.explore: {changed}: expected {parameter.expected()}, got {value!r}"
            )
    if expected != hparams:
        differing = [n for n, value in hparams if value != getattr(expected, n)]
        raise ShapeError(
            f"{name}.explore: expected changes that lead from the candidate's hyperparameters to "
            f"the returned ones, got {shown(changes)} beside another {', '.join(differing)}; name "
            "each changed value"
        )
    return hparams, changes


def _plain(value: Any) -> Value:  # noqa: ANN401 -- what a user's class returned
    """Return a value as a built-in type, such as float for a number of numpy."""
    if isinstance(value, str | bool):
        return value
    return int(value) if is_whole(value) else float(value)
