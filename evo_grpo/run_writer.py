"""Writes rounds into a run folder while the next round already trains.

The training thread copies an agent's tensors to the CPU, turns them into the bytes of their files
and takes the digests, so that a record has them from the start. Files, the line in rounds.jsonl and
the Optuna trials are left to one writer thread, in order. A round counts once its line is there, so
a crash loses at most the round that was being written. An error of the writer surfaces at the next
call, or when the writer is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from evo_grpo.checkpoints.write import Serialised, saved_agent, snapshot_agent
from evo_grpo.cohort.cohort import Cohort
from evo_grpo.record.family import best_ever
from evo_grpo.record.files import writing
from evo_grpo.record.leaderboard import write_csv
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.records import RoundRecord, SavedAgent
from evo_grpo.record.retention import Retention, kept_checkpoints
from evo_grpo.record.run_dir import RunDir
from evo_grpo.types import Slot

WAITING = 2
"""Rounds that may wait for the writer; training waits for it where disks are slower than that."""

_log = logging.getLogger(__name__)


@final
class NullWriter:
    """Writes nothing, for a population whose rounds stay in memory."""

    def checkpoint(self, cohort: Cohort, round: int, slot: Slot) -> SavedAgent:
        """Save nothing; see `RunWriter`."""
        del cohort, round, slot
        return SavedAgent()

    def commit(self, record: RoundRecord, completions: Sequence[Mapping[str, Any]]) -> None:
        """Write nothing; see `RunWriter`."""


@final
class FolderWriter:
    """Writes the rounds of a run; a context manager, which waits for its thread on exit.

    Args:
        folder: The open run folder; nobody else writes to it before the writer is closed.
        lineage: The Optuna study, or None.
        keep: Which checkpoints stay once the next round is whole.
        keep_best: Keep a copy of the best agent ever in checkpoints/best.
    """

    def __init__(
        self,
        folder: RunDir,
        lineage: Lineage | None,
        *,
        keep: Retention = "all",
        keep_best: bool = False,
    ) -> None:
        """Keep the pieces; the thread starts with the first write."""
        self.folder = folder
        self.lineage = lineage
        self.keep: Retention = keep
        self.keep_best = keep_best
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="run-writer")
        self._pending: list[Future[None]] = []
        self._unwritten: list[tuple[Serialised, Path]] = []

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait until everything handed over is on disk, also after Ctrl-C."""
        self._thread.shutdown(wait=True)
        if error is None:
            self._raise_errors()

    def checkpoint(self, cohort: Cohort, round: int, slot: Slot) -> SavedAgent:
        """Copy one agent and take its digests; its files follow when the round is committed."""
        path = self.folder.checkpoint_path(round, slot)
        agent = snapshot_agent(cohort, slot).serialise()
        # Written after all agents are copied: two threads at once would slow down the copies.
        self._unwritten.append((agent, path))
        return saved_agent(self.folder.relative(path), agent.digests)

    def commit(self, record: RoundRecord, completions: Sequence[Mapping[str, Any]]) -> None:
        """Queue the round's files, last the line in rounds.jsonl that makes the round count."""
        agents, self._unwritten = self._unwritten, []
        rows = [dict(row) for row in completions]
        if len(self._pending) >= WAITING:  # each of them holds the bytes of all its checkpoints
            self._pending[0].result()
        self._raise_errors()
        self._pending.append(self._thread.submit(self._write_round, record, agents, rows))

    def follow_up(self, rounds: Sequence[RoundRecord]) -> None:
        """Bring what is made from finished rounds up to them; once more changes nothing.

        A run that was stopped in the middle of this does it again when it goes on.
        """
        if self.lineage is not None:
            self.lineage.record_all(rounds)
        recorded = self.folder.rounds()
        write_csv(recorded, self.folder.leaderboard)
        # Before anything is deleted: the best agent may be one of an earlier round.
        if self.keep_best:
            keep_best_of(self.folder, recorded)
        if self.keep != "all":
            self.folder.drop_checkpoints(kept_checkpoints(recorded, self.keep))

    def _raise_errors(self) -> None:
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if not future.done()]
        for future in done:
            future.result()

    def _write_round(
        self,
        record: RoundRecord,
        agents: Sequence[tuple[Serialised, Path]],
        rows: Sequence[Mapping[str, Any]],
    ) -> None:
        files: dict[str, str] = {}
        for agent, path in agents:
            with writing(path):
                written = agent.write(path)
            files |= {f"{self.folder.relative(path)}/{name}": d for name, d in written.items()}
        files |= self.folder.write_completions(record.round, rows)
        self.folder.append_round(replace(record, files=files))
        self.follow_up([record])
        _log.info("%s: round %d recorded", self.folder.path, record.round)


def keep_best_of(folder: RunDir, rounds: Sequence[RoundRecord]) -> None:
    """Bring checkpoints/best up to the finished rounds."""
    best = best_ever(rounds)
    if best is not None and best.checkpoint is not None:
        folder.keep_best(best.checkpoint)
