"""What a trial of Optuna says of an agent in a round, from the records alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Self

from evo_grpo.errors import EvoGrpoError
from evo_grpo.schema.hparams import CLIP_ENDS, MUTABLE
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from evo_grpo.record.records import AgentRecord, RoundRecord
    from evo_grpo.schema.hparams import Hparams
    from evo_grpo.types import Member, Score

# In every trial, whether they mutate or not.
_ALWAYS = ("lr", "beta", "clip_coef", "group_size")
#: What the names of attributes begin with that hold a metric of training.
TRAIN = "train/"


class StudyChanged(EvoGrpoError):
    """A trial was not added, for the study has others than were known; to be caught, not shown."""


@dataclass(frozen=True)
class Space:
    """The ranges in which the trials of a run lie.

    Where one trial had another range than the next, Optuna would take them for answers to different
    questions, and leave the hyperparameter out of its importances.

    Attributes:
        mutable: What may mutate within which bounds.
        first: Least and greatest value in the first round of what has no bounds.
    """

    mutable: HyperparameterConfig = field(default_factory=HyperparameterConfig)
    first: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    def begun_with(self, record: RoundRecord) -> Self:
        """Return the space of a run with this first round."""
        values: dict[str, list[float]] = {}
        for agent in record.agents:
            for name, value in _values(agent.hparams, self.mutable).items():
                values.setdefault(name, []).append(value)
        return type(self)(self.mutable, {name: (min(v), max(v)) for name, v in values.items()})

    def parameters(self, hparams: Hparams) -> tuple[dict[str, float], dict[str, BaseDistribution]]:
        """Return what a trial trained with, and the ranges; None is no number and left out."""
        params: dict[str, float] = {}
        distributions: dict[str, BaseDistribution] = {}
        for name, value in _values(hparams, self.mutable).items():
            found = self._distribution(name, value)
            if found is not None:
                params[name], distributions[name] = value, found
        return params, distributions

    def _distribution(self, name: str, value: float) -> BaseDistribution | None:
        """Return a range, widened to a value outside; None where its logarithm excludes that."""
        from optuna.distributions import FloatDistribution, IntDistribution

        bounds, integer = self._bounds(name), MUTABLE[name] is int
        ends = [] if bounds is None else [bounds.min, bounds.max]
        ends += self.first.get(name, ())
        low, high = min([value, *ends]), max([value, *ends])
        # A range that is known beforehand says whether it is logarithmic, for Optuna's databases
        # refuse to have that change.
        least = min(ends) if name in self.first else low
        log = least > 0
        if log and value <= 0:
            return None
        if integer:
            return IntDistribution(math.floor(low), math.ceil(high), log=log)
        return FloatDistribution(low, high, log=log)

    def _bounds(self, name: str) -> RLParameter | None:
        known = self.mutable.parameters
        if name in known or name not in CLIP_ENDS or "clip_coef" not in known:
            return known.get(name)
        # The range of a clip distance is that of the ratio bound at either end.
        distance = known["clip_coef"]
        if name == "clip_low":
            return RLParameter(max(0.0, 1 - distance.max), 1 - distance.min)
        return RLParameter(1 + distance.min, 1 + distance.max)


def _values(hparams: Hparams, mutable: HyperparameterConfig) -> dict[str, float]:
    """Return the numbers that are parameters of a trial, a clip pair as its two ends."""
    values: dict[str, float] = {}
    for name in dict.fromkeys((*_ALWAYS, *mutable.names())):
        if name == "clip_coef" and (
            isinstance(hparams.clip_coef, tuple) or set(CLIP_ENDS) & set(mutable.names())
        ):
            values |= dict(zip(CLIP_ENDS, hparams.clip_bounds, strict=True))
        elif name not in values and (value := hparams.get(name)) is not None:
            values[name] = value
    return values


def trial_of(
    agent: AgentRecord,
    record: RoundRecord,
    parent: FrozenTrial | None,
    space: Space,
    *,
    bare: bool = False,
) -> FrozenTrial:
    """Return the trial of an agent in a round.

    Args:
        agent: The agent.
        record: Its round.
        parent: The trial that it goes on from, None in the first round.
        space: The ranges.
        bare: Leave out metrics and the rewards of steps.
    """
    from optuna.trial import TrialState, create_trial

    goes_on = parent is not None and parent.user_attrs["member"] == agent.member
    score = agent.score
    changes = {name: list(change) for name, change in agent.mutation.changes.items()}
    attributes = {
        "agent": agent.agent,
        "member": agent.member,
        "parent": agent.parent,
        "round": agent.round,
        "parent_trial": None if parent is None else parent.number,
        "op": "continue" if goes_on else agent.mutation.op,
        "mutated": {} if goes_on else changes,
        "adapter_sha256": agent.adapter_sha256,
        "checkpoint": agent.checkpoint,
        "seed": agent.seed,
        "hparams": agent.hparams.to_dict(),
        "fitness_se": None if score is None else finite(score.se),
        "reason": agent.reason,
    }
    if not bare:
        attributes |= _metrics(agent)
    fitness = finite(score.mean) if score is not None and agent.state == "ok" else None
    params, distributions = space.parameters(agent.hparams)
    trial = create_trial(
        state=TrialState.FAIL if fitness is None else TrialState.COMPLETE,
        values=None if fitness is None else [fitness],
        params=params,
        distributions=distributions,
        user_attrs=attributes,
        intermediate_values={} if bare else _steps(agent),
    )
    return _at(trial, record.started, record.ended)


def mean_trial(
    member: Member, parent: FrozenTrial, last: RoundRecord, score: Score, space: Space
) -> FrozenTrial:
    """Return the trial of the mean of two survivors.

    Args:
        member: The mean, with both parents.
        parent: The trial of the first parent in the last round.
        last: The last round.
        score: Its fitness on validation prompts.
        space: The ranges.
    """
    from optuna.trial import TrialState, create_trial

    hparams = next(agent for agent in last.agents if agent.member == member.parent).hparams
    params, distributions = space.parameters(hparams)
    attributes = {
        "agent": None,
        "member": member.id,
        "parent": member.parent,
        "second_parent": member.second_parent,
        "round": last.round + 1,
        "parent_trial": parent.number,
        "op": member.mutation.op,
        "mutated": {},
        "hparams": hparams.to_dict(),
        "fitness_se": finite(score.se),
        "reason": "",
    }
    trial = create_trial(
        state=TrialState.COMPLETE,
        values=[score.mean],
        params=params,
        distributions=distributions,
        user_attrs=attributes,
    )
    return _at(trial, last.ended, last.ended)


def same_trial(trial: FrozenTrial, other: FrozenTrial) -> bool:
    """Return whether two trials say the same, whenever they were."""

    def told(one: FrozenTrial) -> tuple[object, ...]:
        return (
            *(one.state, one.values, one.params, one.distributions),
            *(one.user_attrs, one.intermediate_values),
        )

    return told(trial) == told(other)


def same_life(trial: FrozenTrial, other: FrozenTrial) -> bool:
    """Return whether two trials are of the same agent with the same result.

    Less than `same_trial` asks, which another version of this library may put otherwise.
    """

    def told(one: FrozenTrial) -> tuple[object, ...]:
        names = ("agent", "member", "parent", "round", "adapter_sha256", "hparams")
        return (one.state, one.values, *(one.user_attrs.get(name) for name in names))

    return told(trial) == told(other)


def _at(trial: FrozenTrial, started: float | None, ended: float | None) -> FrozenTrial:
    """Give a trial its times in seconds since 1970, where they are known; else it keeps its own."""
    if started is not None and ended is not None:
        # Optuna has times without a zone, those of the place where it runs.
        trial.datetime_start = datetime.fromtimestamp(started)
        trial.datetime_complete = datetime.fromtimestamp(ended)
    return trial


def _metrics(agent: AgentRecord) -> dict[str, float]:
    """Return the metrics of a round's training; those that are not finite are left out."""
    numbers = {**agent.metrics, "tokens": agent.tokens}
    return {f"{TRAIN}{name}": number for name, number in numbers.items() if math.isfinite(number)}


def _steps(agent: AgentRecord) -> dict[int, float]:
    """Return the training rewards by the number of their step in the run."""
    first = agent.round * len(agent.step_rewards)
    return {
        first + step: reward for step, reward in enumerate(agent.step_rewards) if reward is not None
    }


def finite(value: float | None) -> float | None:
    """Return a number, None where it is not finite: a record read back holds None there."""
    return value if value is not None and math.isfinite(value) else None
