"""The Optuna trials of a run: one per (agent, round), with the number of its parent trial."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self, final

from evo_grpo.errors import CheckpointError
from evo_grpo.schema.hparams import CLIP_ENDS, Value, type_of
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from evo_grpo.record.records import AgentRecord, RoundRecord
    from evo_grpo.schema.hparams import Hparams

# Parameters of every trial, whether or not they mutate.
_ALWAYS = ("lr", "beta", "clip_coef", "group_size")


@final
class Lineage:
    """The trials of a run.

    The parameters of a trial are lr, beta, clip_coef, group_size and all other hyperparameters that
    may mutate, a clip pair as clip_low and clip_high. The values are the fitness and the further
    objectives. The trial of a failed agent has state FAIL and no value. After a round in between
    the state is PRUNED, so that it is never Optuna's best trial: its fitness comes from few
    validation prompts or is the mean reward of training. A trial starts and ends with its round.
    The intermediate values are the mean training rewards by the number of the step in the run. The
    user attributes are:

    - agent, round, member, parent (a member id), seed, hparams (all of them), fitness_se, reason
      (why it failed), adapter_sha256, checkpoint (relative to the run folder)
    - parent_trial: the number of the parent trial, None in the first round. For a member that
      played the round before it is the member's own trial of that round, else that of its parent.
    - op, mutated {name: [old, new]}: the change since the parent trial: "init", "clone",
      "mutate", "restore" (the best agent ever, at a lower lr), or "continue" (no change); by
      request of the user "steer-clone", "steer-set" or "steer-restore" (see `types.Mutation`)
    - train/reward, train/kl, ...: the metrics of the round's training

    If the mean of two survivors wins the run, it has a trial too, one round later, with op "mean"
    and the attribute second_parent, the member id of the other parent.

    Args:
        study: The study; see `evo_grpo.record.study.open_study`.
        hp_config: The hyperparameters that mutate and their bounds; None if none mutates.
    """

    def __init__(self, study: Study, hp_config: HyperparameterConfig | None = None) -> None:
        self.study = study
        self._space = Space(hp_config or HyperparameterConfig())
        self._count = 0
        self._by_agent: dict[tuple[int, int], FrozenTrial] = {}
        self._by_member: defaultdict[int | None, dict[int, FrozenTrial]] = defaultdict(dict)
        self._means: set[int] = set()
        self._archived: dict[int, tuple[int, int] | None] = {}

    def record(self, record: RoundRecord) -> list[FrozenTrial]:
        """Add and return the missing trials of a finished round.

        CheckpointError is raised if the parent trial of an agent is missing.
        """
        self._begin(record)
        self._update()
        # Parents live in earlier rounds, so the order among this round's agents does not matter.
        for agent in record.agents:
            if (agent.agent, agent.round) not in self._by_agent:
                self.study.add_trial(self._trial(agent, record))
        return self._update()

    def conflicts_with(self, record: RoundRecord) -> bool:
        """Return whether the study has a trial of this round with another agent or result."""
        self._begin(record)
        self._update()
        found = ((self._by_agent.get((one.agent, one.round)), one) for one in record.agents)
        return any(
            trial is not None and not _same_result(trial, self._trial(agent, record))
            for trial, agent in found
        )

    def record_mean(self, summary: Mapping[str, Any], last: RoundRecord) -> None:
        """Add the trial of the mean of two survivors if it won a run that ended with `last`."""
        best = summary["best"]
        scores = [one["validation"] for one in summary["candidates"] if one["kind"] == "mean"]
        self._update()
        ended = summary["rounds"] == last.round + 1 and last.round + 1 not in self._means
        if ended and best["kind"] == "mean" and scores and scores[0] is not None:
            parent = self._by_member[best["parents"][0]][last.round]
            self.study.add_trial(_mean_trial(best, scores[0], parent, last, self._space))
            self._update()

    def _begin(self, record: RoundRecord) -> None:
        self._archived[record.round] = record.archived
        if record.round == 0:
            self._space = self._space.begun_with(record)

    def _update(self) -> list[FrozenTrial]:
        """Read and return the new trials of the study."""
        new = self.study.get_trials(deepcopy=False)[self._count :]
        self._count += len(new)
        for trial in new:
            agent, member, round = map(trial.user_attrs.get, ("agent", "member", "round"))
            if member is None or round is None:
                continue  # a trial that this package did not add
            if agent is None:
                # The mean of a finished run. If the run was extended, another member has its id.
                self._means.add(round)
            else:
                # Keep the first of two: Optuna adds a trial again if a server does not confirm it.
                self._by_agent.setdefault((agent, round), trial)
                self._by_member[member].setdefault(round, trial)
        return new

    def _trial(self, agent: AgentRecord, record: RoundRecord) -> FrozenTrial:
        return _trial_of(agent, record, self._parent(agent), self._space)

    def _parent(self, agent: AgentRecord) -> FrozenTrial | None:
        own = self._by_member[agent.member].get(agent.round - 1)
        if own is not None:
            return own
        if agent.mutation.restores:
            # The parent is the trial of the agent that the archive holds, in its round.
            archived = self._archived.get(agent.round - 1)
            parent = (
                self._by_member[agent.parent].get(archived[0])
                if archived is not None
                else self._best_before(agent.parent, agent.round)
            )
        else:
            parent = self._by_member[agent.parent].get(agent.round - 1)
        if parent is None and (agent.parent is not None or agent.round > 0):
            raise CheckpointError(
                f"{self.study.study_name}: expected a trial of member {agent.member} or of its "
                f"parent {agent.parent} in round {agent.round}, as the parent trial of agent "
                f"{agent.agent} in round {agent.round + 1}, got none; record the rounds in order"
            )
        return parent

    def _best_before(self, member: int | None, round: int) -> FrozenTrial | None:
        """Return the trial of a member with the best fitness before a round (ties: the first)."""
        life = self._by_member[member]
        ranked = [t for number, t in life.items() if number < round and t.values is not None]
        signs = [1 if one.name == "MINIMIZE" else -1 for one in self.study.directions]

        def place(trial: FrozenTrial) -> list[float]:
            return [sign * value for sign, value in zip(signs, trial.values, strict=True)]

        return min(ranked, key=place, default=None)


@dataclass(frozen=True)
class Space:
    """The distributions of the parameters of a run's trials.

    A parameter should have the same distribution in all trials, since Optuna's importances leave
    out parameters with several.

    Attributes:
        mutable: The hyperparameters that may mutate, with their bounds.
        first: Least and greatest value of each hyperparameter in the first round.
    """

    mutable: HyperparameterConfig = field(default_factory=HyperparameterConfig)
    first: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    def begun_with(self, record: RoundRecord) -> Self:
        """Return the space of a run whose first round is `record`."""
        values: dict[str, list[float]] = {}
        for agent in record.agents:
            for name, value in _values(agent.hparams, self.mutable).items():
                if not isinstance(value, str | bool):
                    values.setdefault(name, []).append(value)
        return type(self)(self.mutable, {name: (min(v), max(v)) for name, v in values.items()})

    def parameters(self, hparams: Hparams) -> tuple[dict[str, Value], dict[str, BaseDistribution]]:
        """Return the parameters of a trial that are not None, and their distributions."""
        params: dict[str, Value] = {}
        distributions: dict[str, BaseDistribution] = {}
        for name, value in _values(hparams, self.mutable).items():
            found = self._distribution(name, value)
            if found is not None:
                params[name], distributions[name] = value, found
        return params, distributions

    def _distribution(self, name: str, value: Value) -> BaseDistribution | None:
        """Return the distribution of a parameter; a range is widened to include `value`.

        None if `value` is not positive on a logarithmic scale, or is not one of the choices.
        """
        from optuna.distributions import (
            CategoricalDistribution,
            FloatDistribution,
            IntDistribution,
        )

        bounds, integer = self._bounds(name), type_of(name) is int
        if bounds is not None and bounds.choices is not None:
            return CategoricalDistribution(bounds.choices) if bounds.allows(value) else None
        if isinstance(value, str | bool):
            return None
        ends = [] if bounds is None else [bounds.min, bounds.max]
        ends += self.first.get(name, ())
        low, high = min([value, *ends]), max([value, *ends])
        # Decide `log` from bounds that are the same for all trials: Optuna's databases refuse
        # trials of one study that differ in it.
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
        # clip_coef is a distance from 1; clip_low and clip_high are bounds of the ratio.
        distance = known["clip_coef"]
        if name == "clip_low":
            return RLParameter(max(0.0, 1 - distance.max), 1 - distance.min)
        return RLParameter(1 + distance.min, 1 + distance.max)


def _values(hparams: Hparams, mutable: HyperparameterConfig) -> dict[str, Value]:
    """Return the parameters of a trial, a clip pair as clip_low and clip_high."""
    values: dict[str, Value] = {}
    for name in dict.fromkeys((*_ALWAYS, *mutable.names())):
        if name == "clip_coef" and (
            isinstance(hparams.clip_coef, tuple) or set(CLIP_ENDS) & set(mutable.names())
        ):
            values |= dict(zip(CLIP_ENDS, hparams.clip_bounds, strict=True))
        elif name not in values and (value := hparams.get(name)) is not None:
            values[name] = value
    return values


def _trial_of(
    agent: AgentRecord,
    record: RoundRecord,
    parent: FrozenTrial | None,
    space: Space,
) -> FrozenTrial:
    """Return the trial of an agent in a round; `parent` is its parent trial, None in round 0."""
    continues = parent is not None and parent.user_attrs["member"] == agent.member
    score = agent.score
    changes = {name: list(change) for name, change in agent.mutation.changes.items()}
    attributes = {
        "agent": agent.agent,
        "member": agent.member,
        "parent": agent.parent,
        "round": agent.round,
        "parent_trial": None if parent is None else parent.number,
        "op": "continue" if continues else agent.mutation.op,
        "mutated": {} if continues else changes,
        "adapter_sha256": agent.adapter_sha256,
        "checkpoint": agent.checkpoint,
        "seed": agent.seed,
        "hparams": agent.hparams.to_dict(),
        "fitness_se": None if score is None else _finite(score.se),
        **{f"{o.name}_se": _finite(o.se) for o in (() if score is None else score.further)},
        "reason": agent.reason,
        **_metrics(agent),
    }
    values: list[float] | None = None
    if score is not None and agent.state == "ok" and score.is_finite:
        values = [one.mean for one in (score, *score.further)]
    times = record.started, record.ended
    return _finished(
        values,
        space.parameters(agent.hparams),
        attributes,
        times,
        _steps(agent),
        between=record.between,
    )


def _mean_trial(
    best: Mapping[str, Any],
    score: Mapping[str, Any],
    parent: FrozenTrial,
    last: RoundRecord,
    space: Space,
) -> FrozenTrial:
    """Return the trial of the mean of two survivors; `parent` is the first one's last trial."""
    first, second = best["parents"]
    hparams = next(agent for agent in last.agents if agent.member == first).hparams
    attributes = {
        "agent": None,
        "member": best["member"],
        "parent": first,
        "second_parent": second,
        "round": last.round + 1,
        "parent_trial": parent.number,
        "op": "mean",
        "mutated": {},
        "hparams": hparams.to_dict(),
        "fitness_se": score["se"],
        "reason": "",
    }
    times = last.ended, last.ended
    mean = math.nan if score["mean"] is None else score["mean"]
    return _finished([mean], space.parameters(hparams), attributes, times)


def _same_result(trial: FrozenTrial, other: FrozenTrial) -> bool:
    """Return whether two trials have the same agent and result; other attributes may differ."""
    names = ("agent", "member", "parent", "round", "adapter_sha256", "hparams")
    own, theirs = trial.user_attrs, other.user_attrs
    return (trial.state, trial.values) == (other.state, other.values) and all(
        own.get(name) == theirs.get(name) for name in names
    )


def _finished(
    values: list[float] | None,
    parameters: tuple[dict[str, Value], dict[str, BaseDistribution]],
    attributes: Mapping[str, object],
    times: tuple[float | None, float | None],
    steps: dict[int, float] | None = None,
    *,
    between: bool = False,
) -> FrozenTrial:
    """Return a finished trial: FAIL if `values` is None, PRUNED for a round in between.

    `times` are start and end in seconds since 1970; if one is None, both are the present time.
    """
    from optuna.trial import TrialState, create_trial

    state = TrialState.PRUNED if between else TrialState.COMPLETE
    trial = create_trial(
        state=TrialState.FAIL if values is None else state,
        values=values,
        params=parameters[0],
        distributions=parameters[1],
        user_attrs=dict(attributes),
        intermediate_values=steps,
    )
    started, ended = times
    if started is not None and ended is not None:
        # Optuna stores local times without a time zone.
        trial.datetime_start = datetime.fromtimestamp(started)
        trial.datetime_complete = datetime.fromtimestamp(ended)
    return trial


def _metrics(agent: AgentRecord) -> dict[str, float]:
    """Return the finite metrics of a round's training."""
    numbers = {**agent.metrics, "tokens": agent.tokens}
    return {f"train/{name}": number for name, number in numbers.items() if math.isfinite(number)}


def _steps(agent: AgentRecord) -> dict[int, float]:
    """Return the training rewards by the number of the step in the run."""
    first = agent.round * len(agent.step_rewards)
    return {
        first + step: reward for step, reward in enumerate(agent.step_rewards) if reward is not None
    }


def _finite(value: float | None) -> float | None:
    """Return the value, None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None
