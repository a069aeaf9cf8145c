"""Optuna's view of a run: one trial per (agent, round), each with its parent, in a journal."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, final

from evo_grpo.errors import CheckpointError
from evo_grpo.schema.hparams import CLIP_ENDS, MUTABLE
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from evo_grpo.record.records import AgentRecord, RoundRecord
    from evo_grpo.schema.hparams import Hparams
    from evo_grpo.types import Member, Score

# In every trial, whether they mutate or not.
_ALWAYS = ("lr", "beta", "clip_coef", "group_size")


@final
class Lineage:
    """The trials of a run.

    A trial's parameters are lr, beta, clip_coef, group_size and whatever else may mutate, a clip
    pair as clip_low and clip_high. Its value is the fitness; a failed agent is a trial in state
    FAIL, without one. Its user attributes:

    - agent, round, member, parent (a member id), seed, hparams (all of them), fitness_se, reason
      (why it failed), adapter_sha256, checkpoint (relative to the run folder)
    - parent_trial: the number of the trial it goes on from, None in the first round. For a member
      that goes on this is its own trial of the round before, for a new one that of its parent.
    - op, mutated {name: [old, new]}: the change since the parent trial: "init", "clone",
      "mutate", "restore" (the best agent ever, at a lower lr), or "continue" (none)

    Where the mean of two survivors is the best of the run, it has a trial too, one round later,
    with op "mean" and second_parent.

    Args:
        storage: The journal's path, or any Optuna storage.
        study_name: Name of the study, made when missing.
        hp_config: The hyperparameters that mutate and their bounds; None when none does.

    Attributes:
        study: The study. That of a journal holds an outline of its trials, so that a long run's
            memory does not grow with them: state, value, agent, round and member.

    Raises:
        CheckpointError: When the journal is damaged.
    """

    def __init__(
        self,
        storage: str | Path | BaseStorage,
        study_name: str,
        hp_config: HyperparameterConfig | None = None,
    ) -> None:
        # Imported late: it takes longer to load than everything else the command line needs.
        import optuna

        self._hp_config = HyperparameterConfig() if hp_config is None else hp_config
        self._journal = Path(storage).absolute() if isinstance(storage, str | Path) else None
        with _quiet():
            if isinstance(storage, str | Path):
                from evo_grpo.record.journal import journal

                storage = journal(Path(storage))
            self.study: Study = optuna.create_study(
                storage=storage, study_name=study_name, direction="maximize", load_if_exists=True
            )
        self._recorded = _Recorded()

    def trials(self) -> list[FrozenTrial]:
        """Return all trials, by number; a journal is read for their parameters and attributes."""
        if self._journal is None:
            return self._outlines()
        from evo_grpo.record.journal import whole_trials

        return whole_trials(self._journal, self.study.study_name)

    def record(self, record: RoundRecord) -> None:
        """Add a trial for every agent of a finished round that has none yet.

        Args:
            record: The round; the one before it has to be recorded already.

        Raises:
            CheckpointError: When the trial that an agent goes on from is missing.
        """
        if all(self._recorded.at(a.member, a.round) is not None for a in record.agents):
            return  # without asking Optuna, whose answer is as long as the run
        self._recorded.read(self._outlines())
        # Parents live in earlier rounds, so the order among this round's agents does not matter.
        for agent in record.agents:
            if self._recorded.at(agent.member, agent.round) is None:
                self.study.add_trial(self._trial(agent, self._parent_trial(agent)))

    def differing(self, rounds: Sequence[RoundRecord]) -> list[tuple[int, int]]:
        """Return agent and round of each recorded agent whose trial is missing or another.

        A trial of the last round may be missing: it is written after the round counts.
        """
        there = {(t.user_attrs.get("agent"), t.user_attrs.get("round")): t for t in self.trials()}
        self._recorded.read(self._outlines())
        found: list[tuple[int, int]] = []
        for agent in (agent for record in rounds for agent in record.agents):
            trial = there.get((agent.agent, agent.round))
            if trial is None and agent.round == rounds[-1].round:
                continue
            try:
                expected = self._trial(agent, self._parent_trial(agent))
                same = trial is not None and _same(trial, expected)
            except (CheckpointError, KeyError):  # of a parent, whose trial is missing or damaged
                same = False
            if not same:
                found.append((agent.agent, agent.round))
        return found

    def record_all(self, rounds: Iterable[RoundRecord]) -> None:
        """Record rounds in order, as a resume does; recorded rounds are skipped."""
        for record in rounds:
            self.record(record)

    def record_mean(self, member: Member, last: RoundRecord, score: Score | None) -> None:
        """Add a trial for the mean of two survivors, once.

        Args:
            member: The mean, with both parents.
            last: The last round, which the parents finished.
            score: Its fitness on validation prompts.
        """
        from optuna.trial import TrialState, create_trial

        trials = self._outlines()
        if score is None or any(t.user_attrs.get("member") == member.id for t in trials):
            return
        parent = next(agent for agent in last.agents if agent.member == member.parent)
        params, distributions = _parameters(parent.hparams, self._hp_config)
        number = next(
            t.number
            for t in trials
            if t.user_attrs.get("member") == parent.member and t.user_attrs["round"] == last.round
        )
        self.study.add_trial(
            create_trial(
                state=TrialState.COMPLETE,
                values=[score.mean],
                params=params,
                distributions=distributions,
                user_attrs={
                    "agent": None,
                    "member": member.id,
                    "parent": member.parent,
                    "second_parent": member.second_parent,
                    "round": last.round + 1,
                    "parent_trial": number,
                    "op": member.mutation.op,
                    "mutated": {},
                    "hparams": parent.hparams.to_dict(),
                    "fitness_se": _finite(score.se),
                    "reason": "",
                },
            )
        )

    def _outlines(self) -> list[FrozenTrial]:
        """Return all trials, by number; those of a journal with the attributes in `ASKED` alone."""
        return self.study.get_trials(deepcopy=False)

    def _parent_trial(self, agent: AgentRecord) -> FrozenTrial | None:
        own = self._recorded.at(agent.member, agent.round - 1)
        if own is not None:
            return own
        if agent.mutation.op == "restore":
            # From the best agent ever, as it was in the round in which it was the best.
            parent = self._recorded.best_before(agent.parent, agent.round)
        else:
            parent = self._recorded.at(agent.parent, agent.round - 1)
        if parent is not None:
            return parent
        if agent.parent is None and agent.round == 0:
            return None
        raise CheckpointError(
            f"{self.study.study_name}: expected a trial of member {agent.member} or of its parent "
            f"{agent.parent} in round {agent.round - 1}, since agent {agent.agent} of round "
            f"{agent.round} goes on from it, got none; record the rounds from the first "
            "on (Lineage.record_all)"
        )

    def _trial(self, agent: AgentRecord, parent: FrozenTrial | None) -> FrozenTrial:
        from optuna.trial import TrialState, create_trial

        params, distributions = _parameters(agent.hparams, self._hp_config)
        goes_on = parent is not None and parent.user_attrs["member"] == agent.member
        score = agent.score
        fitness = _finite(score.mean) if score is not None and agent.state == "ok" else None
        return create_trial(
            state=TrialState.FAIL if fitness is None else TrialState.COMPLETE,
            values=None if fitness is None else [fitness],
            params=params,
            distributions=distributions,
            user_attrs={
                "agent": agent.agent,
                "member": agent.member,
                "parent": agent.parent,
                "round": agent.round,
                "parent_trial": None if parent is None else parent.number,
                "op": "continue" if goes_on else agent.mutation.op,
                "mutated": {}
                if goes_on
                else {name: list(change) for name, change in agent.mutation.changes.items()},
                "adapter_sha256": agent.adapter_sha256,
                "checkpoint": agent.checkpoint,
                "seed": agent.seed,
                "hparams": agent.hparams.to_dict(),
                "fitness_se": None if score is None else _finite(score.se),
                "reason": agent.reason,
            },
        )


def _same(trial: FrozenTrial, other: FrozenTrial) -> bool:
    def told(one: FrozenTrial) -> tuple[object, ...]:
        return one.state, one.values, one.params, one.distributions, one.user_attrs

    return told(trial) == told(other)


class _Recorded:
    """The trials that are there, by member and round.

    Each is looked at once, so that a round of a long run is recorded as fast as one of a short run.
    """

    def __init__(self) -> None:
        self._read = 0
        self._lives: defaultdict[int | None, dict[int, FrozenTrial]] = defaultdict(dict)

    def read(self, trials: Sequence[FrozenTrial]) -> None:
        """Take in the trials that are new among all trials of the study."""
        for trial in trials[self._read :]:
            said = trial.user_attrs
            if "member" in said:
                self._lives[said["member"]].setdefault(said["round"], trial)
        self._read = len(trials)

    def at(self, member: int | None, round: int) -> FrozenTrial | None:
        """Return the trial of a member in a round, None where it has none."""
        return self._lives.get(member, {}).get(round)

    def best_before(self, member: int | None, round: int) -> FrozenTrial | None:
        """Return the trial of a member's greatest fitness before a round, the first of equals."""
        life = self._lives.get(member, {})
        ranked = [t for number, t in life.items() if number < round and t.value is not None]
        return max(ranked, key=lambda trial: trial.value or 0.0, default=None)


def _finite(value: float | None) -> float | None:
    # JSON has no NaN: a record read back holds None where a number was not finite.
    return value if value is not None and math.isfinite(value) else None


def _parameters(
    hparams: Hparams, hp_config: HyperparameterConfig
) -> tuple[dict[str, float], dict[str, BaseDistribution]]:
    """Return Optuna's parameters with their distributions; None is no number and left out."""
    params: dict[str, float] = {}
    distributions: dict[str, BaseDistribution] = {}
    for name in dict.fromkeys((*_ALWAYS, *hp_config.names())):
        bounds = hp_config.parameters.get(name)
        if name == "clip_coef" and (
            isinstance(hparams.clip_coef, tuple) or set(CLIP_ENDS) & set(hp_config.names())
        ):
            for end, value in zip(CLIP_ENDS, hparams.clip_bounds, strict=True):
                params[end] = value
                own = hp_config.parameters.get(end) or _bounds_of_end(end, bounds)
                distributions[end] = _distribution(end, value, own)
        elif name not in params and (value := hparams.get(name)) is not None:
            params[name] = value
            distributions[name] = _distribution(name, value, bounds)
    return params, distributions


def _bounds_of_end(end: str, distance: RLParameter | None) -> RLParameter | None:
    """Turn the range of a clip distance into that of the ratio bound at one end."""
    if distance is None:
        return None
    if end == "clip_low":
        return RLParameter(max(0.0, 1 - distance.max), 1 - distance.min)
    return RLParameter(1 + distance.min, 1 + distance.max)


def _distribution(name: str, value: float, bounds: RLParameter | None) -> BaseDistribution:
    """Return the range of a parameter, widened to its value: Optuna refuses one outside."""
    from optuna.distributions import FloatDistribution, IntDistribution

    low = value if bounds is None else min(bounds.min, value)
    high = value if bounds is None else max(bounds.max, value)
    if MUTABLE[name] is int:
        low, high = math.floor(low), math.ceil(high)
        return IntDistribution(low, high, log=low > 0)
    return FloatDistribution(low, high, log=low > 0)


@contextmanager
def _quiet() -> Generator[None]:
    """Suppress Optuna's announcement of the study on stderr; its logging is restored."""
    logger = logging.getLogger("optuna")

    def not_an_announcement(entry: logging.LogRecord) -> bool:
        return entry.levelno > logging.INFO

    handlers = list(logger.handlers)
    for handler in handlers:
        handler.addFilter(not_an_announcement)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(not_an_announcement)
