"""Optuna's view of a run: one trial per (agent, round), each with its parent, in a journal."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, final

from evo_grpo.errors import CheckpointError
from evo_grpo.record.plain import open_plain, read_plain
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
# A lock is held for the milliseconds of a write: one held for seconds belongs to a dead process.
_GRACE_SECONDS = 5

_log = logging.getLogger(__name__)


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
        with _quiet():
            if isinstance(storage, str | Path):
                storage = _journal(Path(storage))
            self.study: Study = optuna.create_study(
                storage=storage, study_name=study_name, direction="maximize", load_if_exists=True
            )

    def trials(self) -> list[FrozenTrial]:
        """Return all trials, by number."""
        return self.study.get_trials(deepcopy=False)

    def record(self, record: RoundRecord) -> None:
        """Add a trial for every agent of a finished round that has none yet.

        Args:
            record: The round; the one before it has to be recorded already.

        Raises:
            CheckpointError: When the trial that an agent goes on from is missing.
        """
        trials = self.trials()
        done = {(t.user_attrs.get("agent"), t.user_attrs.get("round")) for t in trials}
        # Parents live in earlier rounds, so the order among this round's agents does not matter.
        for agent in record.agents:
            if (agent.agent, agent.round) not in done:
                parent = self._parent_trial(agent, trials)
                self.study.add_trial(self._trial(agent, parent))

    def differing(self, rounds: Sequence[RoundRecord]) -> list[tuple[int, int]]:
        """Return agent and round of each recorded agent whose trial is missing or another.

        A trial of the last round may be missing: it is written after the round counts.
        """
        trials = self.trials()
        there = {(t.user_attrs.get("agent"), t.user_attrs.get("round")): t for t in trials}
        found: list[tuple[int, int]] = []
        for agent in (agent for record in rounds for agent in record.agents):
            trial = there.get((agent.agent, agent.round))
            if trial is None and agent.round == rounds[-1].round:
                continue
            try:
                same = trial is not None and _same(
                    trial, self._trial(agent, self._parent_trial(agent, trials))
                )
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

        trials = self.trials()
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

    def _parent_trial(
        self, agent: AgentRecord, trials: Sequence[FrozenTrial]
    ) -> FrozenTrial | None:
        before = [t for t in trials if t.user_attrs.get("round") == agent.round - 1]
        own = [t for t in before if t.user_attrs["member"] == agent.member]
        parents = [t for t in before if t.user_attrs["member"] == agent.parent]
        if agent.mutation.op == "restore" and not own:
            # From the best agent ever, as it was in the round in which it was the best.
            earlier = [
                t for t in trials if t.value is not None and t.user_attrs["round"] < agent.round
            ]
            parents = [t for t in earlier if t.user_attrs["member"] == agent.parent]
            parents = sorted(parents, key=lambda t: -(t.value or 0.0))[:1]
        if own or parents:
            return (own or parents)[0]
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


def differing_trials(
    journal: Path, study_name: str, hp_config: HyperparameterConfig, rounds: Sequence[RoundRecord]
) -> list[tuple[int, int]]:
    """Return agent and round of each recorded agent whose trial is missing or says something else.

    See `Lineage.differing`.

    Args:
        journal: The journal, which is not changed.
        study_name: Name of the study.
        hp_config: The hyperparameters that mutate and their bounds.
        rounds: The finished rounds, first to last.

    Raises:
        CheckpointError: There is no journal, or it is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="evo-grpo-journal-") as folder:
        copy = Path(folder) / journal.name
        try:
            copy.write_bytes(read_plain(journal))
        except OSError as error:
            raise CheckpointError(
                f"{journal}: expected the journal that Optuna wrote, got none ({error.strerror}); "
                "a resume writes it anew from rounds.jsonl"
            ) from error
        return Lineage(copy, study_name, hp_config).differing(rounds)


def _same(trial: FrozenTrial, other: FrozenTrial) -> bool:
    def told(one: FrozenTrial) -> tuple[object, ...]:
        return one.state, one.values, one.params, one.distributions, one.user_attrs

    return told(trial) == told(other)


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


def _journal(path: Path) -> BaseStorage:
    """Open a journal after repairing what a process killed during a write left in it."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

    # Absolute, since Optuna's lock is a link to this path: a relative link points to nothing, and
    # Optuna would wait for such a lock forever.
    path = path.absolute()
    lock = path.with_name(f"{path.name}.lock")
    if lock.is_symlink() and not lock.exists():  # the folder was moved after its process died
        lock.unlink()
    _drop_torn_line(path)
    try:
        return JournalStorage(
            JournalFileBackend(str(path), JournalFileSymlinkLock(str(path), _GRACE_SECONDS))
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: expected the journal that Optuna wrote, but a line is damaged ({error}); "
            "delete the file: a resume writes it anew from rounds.jsonl"
        ) from error


def _drop_torn_line(path: Path) -> None:
    """Remove a last line without a line end, to which Optuna would append the next one."""
    if not os.path.lexists(path):
        return
    with os.fdopen(open_plain(path, os.O_RDWR), "r+b") as file:
        contents = file.read()
        whole = contents.rfind(b"\n") + 1
        if whole < len(contents):
            _log.warning("%s: dropped a torn last line of %d bytes", path, len(contents) - whole)
            file.truncate(whole)


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
