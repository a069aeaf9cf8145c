"""Converts a run to Optuna trials: one per agent and round, each with its parent trial's number."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, final

from evo_grpo.errors import CheckpointError
from evo_grpo.record.family import best_ever
from evo_grpo.record.records import AgentRecord, RoundRecord, outline
from evo_grpo.schema.hparams import CLIP_ENDS, Hparams, Value, type_of
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

# Parameters of every trial, whether or not they mutate.
_ALWAYS = ("lr", "beta", "clip_coef", "group_size")


@final
class Lineage:
    """The trials of a run, which are added to a study round by round.

    The parameters are lr, beta, clip_coef, group_size and all other hyperparameters that may
    mutate, a clip pair as clip_low and clip_high. The values are the fitness and the further
    objectives. The trial of a failed agent has state FAIL and no value. In a round without a
    decision, other trials have state PRUNED, so that a fitness from few prompts is never Optuna's
    best. The intermediate values are the mean training rewards of the GRPO steps; their keys are
    the numbers of the steps in the run, from 0. The user attributes are:

    - from the agent's record: agent, round, member, parent (a member id), seed, hparams, reason,
      adapter_sha256, checkpoint; fitness_se, and NAME_se of each further objective
    - parent_trial: the number of the parent trial, None in the first round. If the member
      played the previous round, this is its trial of that round, else the parent's trial.
    - op, mutated {name: [old, new]}: the change since the parent trial, as in `types.Mutation`;
      op is "continue" for a member that trains on
    - train/reward, train/kl, ...: the metrics of the round's training

    If the mean of two survivors wins the run, the mean has a trial too, one round later, with op
    "mean". Its attributes parent and second_parent are the ids of the survivors, the better first.
    """

    def __init__(self, study: Study, hp_config: HyperparameterConfig | None = None) -> None:
        self.study = study
        self._space = Space(hp_config or HyperparameterConfig())
        self._count = 0
        self._by_agent: dict[tuple[int, int], FrozenTrial] = {}
        self._by_member: defaultdict[int | None, dict[int, FrozenTrial]] = defaultdict(dict)
        self._means: set[int] = set()
        self._rounds: dict[int, RoundRecord] = {}

    def record(self, record: RoundRecord) -> list[FrozenTrial]:
        """Add and return the missing trials of a finished round.

        Raises CheckpointError if the parent trial of an agent is missing.
        """
        self._begin(record)
        # Parents live in earlier rounds, so the order among this round's agents does not matter.
        for agent in record.agents:
            if (agent.agent, agent.round) not in self._by_agent:
                self.study.add_trial(self._trial(agent, record))
        return self._update()

    def conflicts_with(self, record: RoundRecord) -> bool:
        """Return whether the study has a trial of this round with another agent or result."""
        self._begin(record)
        return any(
            trial is not None and not _same_result(trial, self._trial(agent, record))
            for agent in record.agents
            for trial in [self._by_agent.get((agent.agent, agent.round))]
        )

    def record_mean(self, summary: Mapping[str, Any], last: RoundRecord) -> None:
        """Add the trial of the mean of two survivors if that mean won the run.

        `summary` is the content of summary.json; `last` is the record of the run's last round.
        """
        best = summary["best"]
        scores = [entry["validation"] for entry in summary["candidates"] if entry["kind"] == "mean"]
        self._update()
        ended = summary["rounds"] == last.round + 1 and last.round + 1 not in self._means
        if ended and best["kind"] == "mean" and scores and scores[0] is not None:
            parent = self._by_member[best["parents"][0]][last.round]
            self.study.add_trial(_mean_trial(best, scores[0], parent, last, self._space))
            self._update()

    def _begin(self, record: RoundRecord) -> None:
        self._rounds[record.round] = outline(record)
        if record.round == 0:
            self._space = self._space.begun_with(record)
        self._update()

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
        previous = self._by_member[agent.member].get(agent.round - 1)
        if previous is not None:
            return previous
        if agent.mutation.restores:  # from the best agent of the rounds before
            best = best_ever([record for n, record in self._rounds.items() if n < agent.round])
            parent = None if best is None else self._by_agent.get((best.agent, best.round))
        else:
            parent = self._by_member[agent.parent].get(agent.round - 1)
        if parent is None and (agent.parent is not None or agent.round > 0):
            raise CheckpointError(
                f"{self.study.study_name}: expected a trial of member {agent.member} or of its "
                f"parent {agent.parent} in round {agent.round}, as the parent trial of agent "
                f"{agent.agent} in round {agent.round + 1}, got none; record the rounds in order"
            )
        return parent


@dataclass(frozen=True)
class Space:
    """The search space of a study: gives each parameter of a trial its distribution.

    A parameter has the same distribution in all trials of a run where possible, because Optuna's
    importances leave out a parameter with several distributions.

    Attributes:
        mutable: The hyperparameters that may mutate, with their bounds.
        first: Least and greatest value of each hyperparameter in the first round.
    """

    mutable: HyperparameterConfig = field(default_factory=HyperparameterConfig)
    first: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    def begun_with(self, record: RoundRecord) -> Space:
        """Return a space with the values of the first round of a run, which is `record`."""
        values: defaultdict[str, list[float]] = defaultdict(list)
        for agent in record.agents:
            for name, value in _values(agent.hparams, self.mutable).items():
                if not isinstance(value, str):
                    values[name].append(value)
        return Space(self.mutable, {name: (min(v), max(v)) for name, v in values.items()})

    def parameters(self, hparams: Hparams) -> tuple[dict[str, Value], dict[str, BaseDistribution]]:
        """Return the values and the distributions of the parameters of a trial that have both."""
        values = _values(hparams, self.mutable)
        distributions = {
            name: distribution
            for name, value in values.items()
            if (distribution := self._distribution(name, value)) is not None
        }
        return {name: values[name] for name in distributions}, distributions

    def _distribution(self, name: str, value: Value) -> BaseDistribution | None:
        """Return the distribution of a parameter; a range is widened to include `value`.

        None if `value` is not positive on a logarithmic scale, or is not one of the choices.
        """
        from optuna import distributions

        bounds, integer = self._bounds(name), type_of(name) is int
        if bounds is not None and bounds.choices is not None:
            return (
                distributions.CategoricalDistribution(bounds.choices)
                if bounds.allows(value)
                else None
            )
        if isinstance(value, str):
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
            return distributions.IntDistribution(math.floor(low), math.ceil(high), log=log)
        return distributions.FloatDistribution(low, high, log=log)

    def _bounds(self, name: str) -> RLParameter | None:
        ranges = self.mutable.parameters
        if name in ranges or name not in CLIP_ENDS or "clip_coef" not in ranges:
            return ranges.get(name)
        # clip_coef is a distance from 1; clip_low and clip_high are bounds of the ratio.
        distance = ranges["clip_coef"]
        if name == "clip_low":
            return RLParameter(max(0.0, 1 - distance.max), 1 - distance.min)
        return RLParameter(1 + distance.min, 1 + distance.max)


def _values(hparams: Hparams, mutable: HyperparameterConfig) -> dict[str, Value]:
    """Return the parameters of a trial by name, with clip_low and clip_high for a clip pair."""
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
    agent: AgentRecord, record: RoundRecord, parent: FrozenTrial | None, space: Space
) -> FrozenTrial:
    """Return the trial of an agent in a round; `parent` is its parent trial, None in round 0."""
    continues = parent is not None and parent.user_attrs["member"] == agent.member
    scores = () if agent.score is None else (agent.score, *agent.score.further)
    errors = ("fitness_se", *(f"{score.name}_se" for score in scores[1:]))
    metrics = {**agent.metrics, "tokens": agent.tokens}
    attributes = {
        "agent": agent.agent,
        "member": agent.member,
        "parent": agent.parent,
        "round": agent.round,
        "parent_trial": None if parent is None else parent.number,
        "op": "continue" if continues else agent.mutation.op,
        "mutated": {}
        if continues
        else {name: list(change) for name, change in agent.mutation.changes.items()},
        "adapter_sha256": agent.adapter_sha256,
        "checkpoint": agent.checkpoint,
        "seed": agent.seed,
        "hparams": agent.hparams.to_dict(),
        "fitness_se": None,
        **{
            name: score.se if math.isfinite(score.se) else None
            for name, score in zip(errors, scores, strict=False)
        },
        "reason": agent.reason,
        **{f"train/{name}": n for name, n in metrics.items() if math.isfinite(n)},
    }
    ranked = agent.score is not None and agent.state == "ok" and agent.score.is_finite
    first_step = agent.round * len(agent.step_rewards)
    return _finished(
        [score.mean for score in scores] if ranked else None,
        space.parameters(agent.hparams),
        attributes,
        (record.started, record.ended),
        {
            first_step + step: reward
            for step, reward in enumerate(agent.step_rewards)
            if reward is not None
        },
        between=record.between,
    )


def _mean_trial(
    best: Mapping[str, Any],
    score: Mapping[str, Any],
    parent: FrozenTrial,
    last: RoundRecord,
    space: Space,
) -> FrozenTrial:
    """Return the trial of the mean of two survivors; `parent`: the better survivor's last trial."""
    first_id, second_id = best["parents"]
    hparams = next(agent for agent in last.agents if agent.member == first_id).hparams
    attributes = {
        "agent": None,
        "member": best["member"],
        "parent": first_id,
        "second_parent": second_id,
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
    attributes, other_attributes = trial.user_attrs, other.user_attrs
    return (trial.state, trial.values) == (other.state, other.values) and all(
        attributes.get(name) == other_attributes.get(name) for name in names
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
    """Return a finished trial, with state FAIL if `values` is None, else PRUNED if `between`.

    `times` are start and end in seconds since 1970; if one is None, both are the current time.
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
