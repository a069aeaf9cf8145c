"""Optuna's view of a run: one trial per (agent, round), each with its parent."""

from __future__ import annotations

import logging
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, final

from evo_grpo.errors import CheckpointError
from evo_grpo.record.trials import (
    Space,
    StudyChanged,
    mean_trial,
    same_life,
    same_trial,
    trial_of,
)
from evo_grpo.schema.search_space import HyperparameterConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from evo_grpo.record.records import AgentRecord, RoundRecord
    from evo_grpo.types import Member, Score


class RunTrials(Protocol):
    """A study that a run has for itself in a database; see `optuna.Study`.

    Attributes:
        study_name: Its name.
    """

    study_name: str

    def get_trials(self, deepcopy: Literal[False] = False) -> list[FrozenTrial]:
        """Return outlines of all trials, by number."""
        ...

    def whole_trials(self) -> list[FrozenTrial]:
        """Return all trials with all that they have, by number."""
        ...

    def add_trial(self, trial: FrozenTrial) -> None:
        """Add a trial behind those that `get_trials` returned last.

        Raises:
            StudyChanged: There is another one there by now.
        """
        ...

    def close(self) -> None:
        """Close the database."""
        ...


@final
class Lineage:
    """The trials of a run.

    A trial's parameters are lr, beta, clip_coef, group_size and whatever else may mutate, a clip
    pair as clip_low and clip_high. Its value is the fitness; a failed agent is a trial in state
    FAIL, without one. It starts and ends with its round, for all agents of a round train together.
    Its intermediate values are the mean training rewards of the steps, numbered through the run.
    Its user attributes:

    - agent, round, member, parent (a member id), seed, hparams (all of them), fitness_se, reason
      (why it failed), adapter_sha256, checkpoint (relative to the run folder)
    - parent_trial: the number of the trial it goes on from, None in the first round. For a member
      that goes on this is its own trial of the round before, for a new one that of its parent.
    - op, mutated {name: [old, new]}: the change since the parent trial: "init", "clone",
      "mutate", "restore" (the best agent ever, at a lower lr), or "continue" (none); by hand
      "steer-clone", "steer-set" or "steer-restore" (see `types.Mutation`)
    - train/reward, train/kl, ...: the metrics of the round's training

    Where the mean of two survivors is the best of the run, it has a trial too, one round later,
    with op "mean" and second_parent.

    Args:
        storage: The journal's path, any Optuna storage, or a study in a database.
        study_name: Name of the study, made when missing; one in a database has its name already.
        hp_config: The hyperparameters that mutate and their bounds; None when none does.

    Attributes:
        study: The study. That of a journal or of a database holds an outline of its trials, so that
            a long run's memory does not grow with them: state, value, agent, round and member.
        added: Trials that were added.

    Raises:
        CheckpointError: When the journal is damaged.
    """

    def __init__(
        self,
        storage: str | Path | BaseStorage | RunTrials,
        study_name: str = "",
        hp_config: HyperparameterConfig | None = None,
    ) -> None:
        # Imported late: it takes longer to load than everything else the command line needs.
        import optuna

        self._first = Space(HyperparameterConfig() if hp_config is None else hp_config)
        self._space = self._first
        self._recorded = _Recorded()
        self._database: RunTrials | None = None
        self.added = 0
        self.study: Study | RunTrials
        self._whole: Callable[[], list[FrozenTrial]] = self._outlines
        if isinstance(storage, str | Path):
            from evo_grpo.record.journal import journal, whole_trials

            path = Path(storage).absolute()
            self._whole = lambda: whole_trials(path, study_name)
            with quiet():
                storage = journal(Path(storage))
        elif not isinstance(storage, optuna.storages.BaseStorage):
            self.study = self._database = storage
            self._whole = storage.whole_trials
            return
        with quiet():
            self.study = optuna.create_study(
                storage=storage, study_name=study_name, direction="maximize", load_if_exists=True
            )

    def close(self) -> None:
        """Close the database; a journal has nothing to be closed."""
        if self._database is not None:
            self._database.close()

    def trials(self) -> list[FrozenTrial]:
        """Return all trials, by number, with their parameters and attributes."""
        return self._whole()

    def record(self, record: RoundRecord) -> None:
        """Add a trial for every agent of a finished round that has none yet.

        Args:
            record: The round; the one before it has to be recorded already.

        Raises:
            CheckpointError: When the trial that an agent goes on from is missing.
        """
        self._begin(record)
        if all(self._recorded.at(a.member, a.round) is not None for a in record.agents):
            return  # without asking Optuna, whose answer is as long as the run
        self._recorded.read(self._outlines())
        # Parents live in earlier rounds, so the order among this round's agents does not matter.
        for agent in record.agents:
            self._add(agent, record)

    def differing(self, rounds: Sequence[RoundRecord]) -> list[tuple[int, int]]:
        """Return agent and round of each recorded agent whose trial is missing or another.

        A trial of the last round may be missing: it is written after the round counts.
        """
        found = self._compare(rounds, same_trial)
        return [
            (agent.agent, agent.round)
            for agent, same in found
            if same is False or (same is None and agent.round != rounds[-1].round)
        ]

    def missing(self, record: RoundRecord) -> int:
        """Return how many agents of a round have no trial yet."""
        self._recorded.read(self._outlines())
        return sum(self._recorded.at(a.member, a.round) is None for a in record.agents)

    def contradicts(self, rounds: Sequence[RoundRecord]) -> bool:
        """Return whether a trial of these rounds is there with another agent or another result."""
        return any(same is False for _, same in self._compare(rounds, same_life))

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
        self._recorded.read(self._outlines())
        if score is None or self._recorded.has_mean(last.round + 1):
            return
        parent = self._recorded.at(member.parent, last.round)
        assert parent is not None, "the last round is recorded"
        self.study.add_trial(mean_trial(member, parent, last, score, self._space_of(last)))
        self.added += 1

    def _add(self, agent: AgentRecord, record: RoundRecord) -> None:
        while self._recorded.at(agent.member, agent.round) is None:
            try:
                self.study.add_trial(self._trial(agent, record))
            except StudyChanged:  # perhaps by this very trial, whose writing was not confirmed
                self._recorded.read(self._outlines())
            else:
                self.added += 1
                return

    def _compare(
        self, rounds: Sequence[RoundRecord], equal: Callable[[FrozenTrial, FrozenTrial], bool]
    ) -> list[tuple[AgentRecord, bool | None]]:
        """Return of each agent whether its trial is as recorded, None where it has none."""
        there = {(t.user_attrs.get("agent"), t.user_attrs.get("round")): t for t in self.trials()}
        self._recorded.read(self._outlines())
        for record in rounds[:1]:
            self._begin(record)
        found: list[tuple[AgentRecord, bool | None]] = []
        for record in rounds:
            for agent in record.agents:
                trial = there.get((agent.agent, agent.round))
                try:
                    same = None if trial is None else equal(trial, self._trial(agent, record))
                except (CheckpointError, KeyError):  # its parent's trial is missing or damaged
                    same = False
                found.append((agent, same))
        return found

    def _outlines(self) -> list[FrozenTrial]:
        """Return all trials, by number; perhaps with the attributes alone by which they are found.

        Those are `ASKED`.
        """
        return self.study.get_trials(deepcopy=False)

    def _trial(self, agent: AgentRecord, record: RoundRecord) -> FrozenTrial:
        parent, space = self._parent_trial(agent), self._space_of(record)
        return trial_of(agent, record, parent, space, bare=self._is_bare(record))

    def _begin(self, record: RoundRecord) -> None:
        if record.round == 0 and self._space is self._first:
            self._space = self._first.begun_with(record)

    def _space_of(self, record: RoundRecord) -> Space:
        return self._first if self._is_bare(record) else self._space

    def _is_bare(self, record: RoundRecord) -> bool:
        """Return whether the trials of a round are those of earlier versions.

        They recorded no times, and the journals that they wrote have to stay what they should be.
        """
        return record.started is None and self._database is None

    def _parent_trial(self, agent: AgentRecord) -> FrozenTrial | None:
        own = self._recorded.at(agent.member, agent.round - 1)
        if own is not None:
            return own
        if agent.mutation.restores:
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
            f"{agent.parent} in round {agent.round}, since agent {agent.agent} of round "
            f"{agent.round + 1} goes on from it, got none; record the rounds from the first "
            "on (Lineage.record_all)"
        )


class _Recorded:
    """The trials that are there, by member and round.

    Each is looked at once, so that a round of a long run is recorded as fast as one of a short run.
    """

    def __init__(self) -> None:
        self._read = 0
        self._lives: defaultdict[int | None, dict[int, FrozenTrial]] = defaultdict(dict)
        self._means: set[int] = set()

    def read(self, trials: Sequence[FrozenTrial]) -> None:
        """Take in the trials that are new among all trials of the study."""
        for trial in trials[self._read :]:
            said = trial.user_attrs
            if "member" not in said:
                continue
            if said["agent"] is None:
                # Of an end of the run; if that was given more rounds, its id went to another.
                self._means.add(said["round"])
            else:
                self._lives[said["member"]].setdefault(said["round"], trial)
        self._read = len(trials)

    def at(self, member: int | None, round: int) -> FrozenTrial | None:
        """Return the trial of a member in a round, None where it has none."""
        return self._lives.get(member, {}).get(round)

    def has_mean(self, round: int) -> bool:
        """Return whether a mean of two survivors has a trial, one round after its parents."""
        return round in self._means

    def best_before(self, member: int | None, round: int) -> FrozenTrial | None:
        """Return the trial of a member's greatest fitness before a round, the first of equals."""
        life = self._lives.get(member, {})
        ranked = [t for number, t in life.items() if number < round and t.value is not None]
        return max(ranked, key=lambda trial: trial.value or 0.0, default=None)


@contextmanager
def quiet() -> Generator[None]:
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
