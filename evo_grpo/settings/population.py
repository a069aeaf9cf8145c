"""The group `population`: the number of agents, the length of training, and stopping rules."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Mapping
from itertools import pairwise
from os import PathLike, fspath
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BeforeValidator, WithJsonSchema

from evo_grpo.evolve.sizes import Sizes, decisions_by_share, halvings, places_by_round
from evo_grpo.evolve.start import StartName
from evo_grpo.schema.group import Group, only, plain, setting
from evo_grpo.schema.problems import nearest

FROM = "from"


def _start(value: object) -> object:
    """Accept a value of `init`; in `{from: RUN}`, a single run becomes a list of one."""
    if isinstance(value, Mapping) and list(cast("Mapping[object, object]", value)) == [FROM]:
        runs = cast("Mapping[str, object]", value)[FROM]
        several = list(cast("list[object]", runs)) if isinstance(runs, list | tuple) else [runs]
        if several and all(isinstance(run, str | PathLike) for run in several):
            return {FROM: [plain(fspath(cast("str", run))) for run in several]}
    if isinstance(value, list | tuple):
        items = cast("list[object]", list(value))
        if all(isinstance(item, Mapping) for item in items):
            return [plain(item) for item in items]
    names = get_args(StartName)
    if value in names:
        return value
    near = nearest(value, names) if isinstance(value, str) else None
    hint = f" (did you mean {near!r}?)" if near else ""
    raise ValueError(
        f"{', '.join(map(repr, names))}, a list with one mapping per agent, or {{from: RUN}}{hint}"
    )


EarlierRuns = Annotated[
    dict[str, list[str]],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                FROM: {
                    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
                }
            },
            "required": [FROM],
            "additionalProperties": False,
        }
    ),
]
Init = Annotated[StartName | list[dict[str, Any]] | EarlierRuns, BeforeValidator(_start)]


AnnotatedSizes = Annotated[
    Sizes,
    only(
        lambda value: value in (None, "constant") or _are_whole(value),
        'null, "constant" or a list of integers such as [8, 4, 2]',
    ),
]
Decisions = Annotated[
    list[int] | Literal["every"] | None,
    only(
        lambda value: (
            value in (None, "every")
            or (_are_whole(value) and value[0] > 0 and value == sorted(set(value)))
        ),
        'null, "every" or a list of rounds in ascending order such as [2, 4, 6]',
    ),
]


def _are_whole(value: object) -> bool:
    items = cast("list[object]", value) if isinstance(value, list) else []
    return bool(items) and all(type(item) is int for item in items)


class StopConfig(Group):
    """Rules that end training before the last round; the first that holds ends it."""

    fitness: float | None = setting(
        None,
        "Stop when the fitness of an agent is surely at least this value: when the lower end of "
        "its 95% interval over the validation prompts of a round is. null: no such rule.",
    )
    rewards: dict[str, float] = setting(
        factory=dict[str, float],
        meaning="Stop when one agent surely reaches the value of each reward function named, by "
        "the same interval of its mean without weights, for instance `{exact: 0.9}`.",
    )
    patience: int | None = setting(
        None,
        "Stop when the best fitness has not improved for this many rounds in a row; any "
        "improvement counts.",
        ge=1,
    )
    minutes: float | None = setting(
        None,
        "Stop when the rounds have taken this many minutes in all, including those before a resume "
        "and excluding pauses. With this rule the same run may end at another round the next time.",
        gt=0,
    )
    tokens: float | None = setting(
        None, "Stop when this many tokens were sampled in training and evaluation.", gt=0
    )
    judge_cost: float | None = setting(
        None,
        "Stop when the judges of the run have cost this much, by their prices; the comparison with "
        "the base at the end asks them once more.",
        gt=0,
    )
    no_signal: int | None = setting(
        3,
        "Stop when no agent had a group to learn from, one whose completions got different "
        "rewards, for this many rounds in a row; null: no such rule.",
        ge=1,
    )

    @property
    def is_empty(self) -> bool:
        """Whether no rule is set."""
        return all(value in (None, {}) for _, value in self)


class PopulationConfig(Group):
    """The number of agents, and the length of their training."""

    size: int = setting(8, "Number of agents.", ge=1, remedy="it counts agents")
    rounds: int = setting(
        6, "Number of rounds: training, evaluation, then selection and exploration.", ge=1
    )
    steps_per_round: int = setting(4, "GRPO steps of every agent in a round.", ge=1)
    stop: StopConfig = setting(
        StopConfig(),
        "Rules that end training after the first round in which one of them holds; the winner is "
        "then compared with the base as usual. `evo-grpo resume RUN --rounds N` continues such a "
        "run.",
    )
    decisions: Decisions = setting(
        None,
        "Rounds after which the run decides: all agents are evaluated, and selection and "
        "exploration act. null: after each quarter of the run, or smaller shares for more than 8 "
        "agents, and after the first round if all agents begin alike; a run records the list. "
        "After the last number, rounds decide at the distance of the last two. `every`: after each "
        "round.",
    )
    sizes: AnnotatedSizes = setting(
        None,
        "Number of agents in each round. null halves it at decisions, down to 2 for the second "
        "half of the run (or keeps all with selection `none`, which removes no agent); a list such "
        "as [8, 4, 2] begins with `size`, and its last number repeats; `constant` keeps all "
        "agents. The remaining agents take more prompts per step, so that rows and time per round "
        "stay the same.",
    )
    init: Init = setting(
        "latin_hypercube",
        "Initial hyperparameters. `latin_hypercube`: agent 0 has the values of `algorithm`, the "
        "others cover the ranges of `evolve.hyperparameters` evenly. `sample`: the others draw "
        "independently from the ranges. `same`: all have the values of `algorithm`. Or a list with "
        "one mapping per agent, for instance `[{}, {lr: 1.0e-4}, {lr: 3.0e-3, beta: 0.01}]`. Or "
        "`{from: RUN}`, a run folder or a list of them: the best settings found there fill half of "
        "the places, moved into the ranges, and the others are as for `latin_hypercube`; the run "
        "records all of them as a list.",
    )

    @property
    def decided(self) -> list[int]:
        """Numbers of the finished rounds after which the run decides, ascending."""
        if isinstance(self.decisions, list):
            return self.decisions
        finished = set(self._halving)
        if isinstance(self.sizes, list):
            finished |= {n for n, (a, b) in enumerate(pairwise(self.sizes), start=1) if b < a}
        if self.init == "same" and self.size > 1:
            finished.add(1)  # agents that begin alike need no evidence to become different
        return sorted(finished)

    def places(self, *, selects: bool) -> tuple[int, ...]:
        """Return the number of agents of each round; the last number holds for all later rounds.

        If `sizes` is null, agents leave at decisions, unless `selects` is false: the selection then
        removes no agent.
        """
        keeps = self.sizes is None and not selects
        halving = self._halving
        if self.decisions == "every":  # from the first round on, as a tournament over few rounds
            halving = halving[: halvings(self.size) + 2]
        return places_by_round(self.size, "constant" if keeps else self.sizes, halving)

    @property
    def _halving(self) -> list[int]:
        """Finished rounds after which a run decides and, with `sizes: null`, may halve agents."""
        if isinstance(self.decisions, list):
            return self.decisions
        if self.decisions == "every":
            return list(range(1, self.rounds + 1))
        return decisions_by_share(self.rounds, self.size)
