"""Writes rounds into a run folder while the next round already trains.

Saving copies tensors to the CPU and hands them to one writer thread; files, digests, the line in
rounds.jsonl and the Optuna trials are its work, in order. A round counts once its line is there, so
a crash loses at most the round that was being written. An error of the writer surfaces at the next
call, or when the keeper is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Self, final

from evo_grpo.checkpoints.write import Digests, Snapshot, snapshot_agent
from evo_grpo.cohort.cohort import Cohort
from evo_grpo.record.leaderboard import write_csv
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.run_dir import RunDir
from evo_grpo.types import Slot


@final
class FolderKeeper:
    """Keeps the rounds of a run; a context manager, which waits for the writer on exit.

    Args:
        folder: The open run folder; nobody else writes to it before the keeper is closed.
        lineage: The Optuna study, or None.
        keep_last: Delete a round's checkpoints once the next round is whole.
    """

    def __init__(
        self,
        folder: RunDir,
        lineage: Lineage | None,
        *,
        keep_last: bool,
    ) -> None:
        """Keep the pieces; the thread starts with the first write."""
        self.folder = folder
        self.lineage = lineage
        self.keep_last = keep_last
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="keeper")
        self._pending: list[Future[None]] = []
        self._digests: dict[str, Digests] = {}

    def __enter__(self) -> Self:
        """Return the keeper."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait until everything handed over is on disk, also after Ctrl-C."""
        self._writer.shutdown(wait=True)
        if error is None:
            self._raise_errors()

    def checkpoint(self, cohort: Cohort, round: int, slot: Slot) -> tuple[str | None, str | None]:
        """Copy one agent and queue its files; the digest follows when the round is committed."""
        path = self.folder.checkpoint_path(round, slot)
        name = self.folder.relative(path)
        self._queue(self._write, name, snapshot_agent(cohort, slot))
        return name, None

    def commit(self, record: RoundRecord, completions: Sequence[Mapping[str, Any]]) -> None:
        """Queue the round: completions first, then the line in rounds.jsonl that makes it count."""
        rows = [dict(row) for row in completions]
        self._queue(self._commit, record, rows)

    def follow_up(self, rounds: Sequence[RoundRecord]) -> None:
        """Bring what is made from finished rounds up to them; once more changes nothing.

        A run that was stopped in the middle of this does it again when it goes on.
        """
        if self.lineage is not None:
            self.lineage.record_all(rounds)
        write_csv(self.folder.rounds(), self.folder.leaderboard)
        if self.keep_last:
            self.folder.drop_checkpoints_before(rounds[-1].round)

    def _queue(self, work: Callable[..., None], *args: Any) -> None:
        self._raise_errors()
        self._pending.append(self._writer.submit(work, *args))

    def _raise_errors(self) -> None:
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if not future.done()]
        for future in done:
            future.result()

    def _write(self, name: str, snapshot: Snapshot) -> None:
        self._digests[name] = snapshot.write(self.folder.path / name)

    def _commit(self, record: RoundRecord, rows: list[dict[str, Any]]) -> None:
        agents = tuple(
            replace(a, **asdict(self._digests.pop(a.checkpoint))) if a.checkpoint else a
            for a in record.agents
        )
        record = replace(record, agents=agents)
        self.folder.write_completions(record.round, rows)
        self.folder.append_round(record)
        self.follow_up([record])
