"""The group `population`: how many agents train for how long, and what ends them earlier."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Mapping
from typing import Annotated, Any, cast, get_args

from pydantic import BeforeValidator

from evo_grpo.evolve.sizes import Sizes
from evo_grpo.evolve.start import StartName
from evo_grpo.schema.group import Group, plain, setting
from evo_grpo.schema.problems import nearest


def _start(value: object) -> object:
    """Accept a name, or a list of mappings; one message instead of one per branch of the union."""
    if isinstance(value, list | tuple):
        items = cast("list[object]", list(value))
        if all(isinstance(item, Mapping) for item in items):
            return [plain(item) for item in items]
    names = get_args(StartName)
    if value in names:
        return value
    near = nearest(value, names) if isinstance(value, str) else None
    hint = f" (did you mean {near!r}?)" if near else ""
    raise ValueError(f"{', '.join(map(repr, names))}, or a list with one mapping per agent{hint}")


Init = Annotated[StartName | list[dict[str, Any]], BeforeValidator(_start)]


def _sizes(value: object) -> object:
    """Accept null, "constant" or integers; one message instead of one per branch of the union."""
    if value is None or value == "constant":
        return value
    items = list(value) if isinstance(value, list | tuple) else []
    if items and all(type(item) is int for item in items):
        return items
    raise ValueError('null, "constant" or a list of integers such as [8, 4, 2]')


AnnotatedSizes = Annotated[Sizes, BeforeValidator(_sizes)]


class StopConfig(Group):
    """What ends the training of a run before its last round; whichever comes first."""

    fitness: float | None = setting(
        None, "The best fitness of a round is so much or more; null sets no such rule."
    )
    patience: int | None = setting(
        None,
        "So many rounds in a row brought no better fitness than the best before them, be it by a "
        "hair.",
        ge=1,
    )
    minutes: float | None = setting(
        None,
        "The rounds took so many minutes together, those before a stop too, pauses not. The one "
        "rule that may end the same run at another round the next time.",
        gt=0,
    )
    tokens: float | None = setting(
        None, "So many tokens were sampled in training and evaluations.", gt=0
    )

    @property
    def is_empty(self) -> bool:
        """Whether no rule is set."""
        return all(value is None for _, value in self)


class PopulationConfig(Group):
    """How many agents train for how long."""

    size: int = setting(8, "Agents.", ge=1, remedy="it counts agents")
    rounds: int = setting(
        6, "Rounds: training, then evaluation, then selection and exploration.", ge=1
    )
    steps_per_round: int = setting(4, "GRPO steps of every agent in a round.", ge=1)
    stop: StopConfig = setting(
        StopConfig(),
        "Rules that end training before the last of `rounds`, after the round in which one of them "
        "holds; then winner and base are judged as at any end. "
        "`evo-grpo resume RUN --rounds N` goes on all the same.",
    )
    sizes: AnnotatedSizes = setting(
        None,
        "Agents by round. null halves them after every round, down to 2 (with selection `none`, "
        "which lets nobody go, it keeps them all); a list such as [8, 4, 2] begins with `size`, "
        "and its last number repeats; `constant` keeps them all. What leaves gives its completions "
        "to the others, as more prompts per step: rows and time per round stay the same.",
    )
    init: Init = setting(
        "latin_hypercube",
        "What agents begin with. `latin_hypercube`: agent 0 has the values of `algorithm`, the "
        "others cover the ranges of `evolve.hyperparameters` evenly. `sample`: the others draw "
        "from the ranges, each for itself. `same`: all have the values of `algorithm`. Or a list "
        "of one mapping per agent, for instance `[{}, {lr: 1.0e-4}, {lr: 3.0e-3, beta: 0.01}]`.",
    )
