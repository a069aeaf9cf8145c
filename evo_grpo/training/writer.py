"""Writes rounds into a run folder while the next round trains.

The training thread copies an agent's tensors to the CPU. One writer thread writes everything in
order; the line in rounds.jsonl comes last and records the round. A crash loses only unwritten
rounds. After an error of the writer nothing more is written, because later rounds would depend on
an unrecorded round. The next call, or closing the writer, raises the error.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, final
from uuid import uuid4

from evo_grpo.population.checkpoints.write import (
    ACTOR_WEIGHTS,
    OPTIMIZER,
    Snapshot,
    snapshot_again,
)
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.ranks.team import Team
from evo_grpo.population.steps import CheckpointFiles, RunWriter
from evo_grpo.record import leaderboard, names, steering
from evo_grpo.record.files import sync_into, to_lines, writing
from evo_grpo.record.folder import round_name
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.run_dir import Retention, RunDir, checkpoint_name
from evo_grpo.types import Slot

WAITING = 2
"""Maximum number of rounds queued for the writer; on a slower disk, training waits."""

_log = logging.getLogger(__name__)


@final
class FolderWriter(RunWriter):
    """Writes the rounds of a run; a context manager that waits for its thread on exit.

    Args:
        folder: The open run folder; until the writer is closed, only the writer writes to it.
        keep: Which checkpoints of a round are kept once the next round is complete.
        keep_best: Keep a copy of the best agent of the run in checkpoints/best.
    """

    def __init__(
        self,
        folder: RunDir,
        *,
        keep: Retention = "all",
        keep_best: bool = False,
    ) -> None:
        self.folder = folder
        self.keep: Retention = keep
        self.keep_best = keep_best
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="run-writer")
        self._pending: list[Future[None]] = []
        self._error: BaseException | None = None
        self._unwritten: dict[str, Snapshot] = {}
        self._written: dict[str, str] = {}

    def __exit__(self, *raised: object) -> None:
        """Wait until every queued write is on disk, even after Ctrl-C."""
        self._thread.shutdown(wait=True)
        if not any(raised):
            self._raise_errors()

    def checkpoint(self, cohort: Cohort, round: int, slot: Slot) -> str:
        """Copy one agent to the CPU; `commit` queues its files. Return the checkpoint's path."""
        path = checkpoint_name(round, slot)
        # Write only after all agents are copied: a second thread would slow down the copies.
        self._unwritten[path] = snapshot_again(cohort, slot, self._unwritten.get(path))
        return path

    def receive(self, files: Sequence[CheckpointFiles]) -> None:
        """Add the checkpoints of all ranks to this round, once the rounds before are on disk."""
        if len(files) > 1:
            for future in self._pending:
                future.result()
            self._raise_errors()
        for part in files:
            self._written |= part.written
            self._unwritten |= part.unwritten

    def step(self, round: int, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Queue the rows of a step; the writer thread serialises and appends them."""
        self._raise_errors()
        self._submit(lambda: self.folder.append_step(round, step, rows))

    def commit(self, record: RoundRecord, completions: Sequence[Mapping[str, Any]]) -> None:
        """Queue the files of a round; its line in rounds.jsonl, written last, records the round."""
        record = replace(record, files={**record.files, **self._written})
        agents, self._unwritten, self._written = self._unwritten, {}, {}
        samples = [dict(row) for row in completions]
        if len(self._pending) >= WAITING:  # each pending round holds the bytes of its checkpoints
            self._pending[0].result()
        self._raise_errors()
        self._pending.append(self._submit(lambda: self._write_round(record, agents, samples)))

    def amend(self, record: RoundRecord) -> None:
        """Queue a new record of a recorded round, with the requests that came after it."""
        self._raise_errors()
        self._pending.append(self._submit(lambda: self._amend_round(record)))

    def note(self, text: str) -> None:
        """Append a sentence to the log of the run."""
        self.folder.note(text)

    def follow_up(self) -> None:
        """Update all files that are derived from finished rounds; a second call changes nothing."""
        leaderboard.write_csv(self.folder.rounds(), self.folder.path)
        # Copy the best agent before deleting checkpoints: it may be from an earlier round.
        if self.keep_best:
            self.folder.keep_best()
        if self.keep != "all":
            self.folder.drop_checkpoints(self.keep)

    def _submit(self, write: Callable[[], None]) -> Future[None]:
        """Queue a write; it is skipped if an earlier write fails."""

        def write_in_order() -> None:
            if self._error is not None:
                return
            try:
                write()
            except BaseException as error:
                self._error = error
                raise

        return self._thread.submit(write_in_order)

    def _raise_errors(self) -> None:
        self._pending = [future for future in self._pending if not future.done()]
        if self._error is not None:
            raise self._error

    def _write_round(
        self,
        record: RoundRecord,
        agents: Mapping[str, Snapshot],
        samples: Sequence[Mapping[str, Any]],
    ) -> None:
        files = dict(record.files)
        for path, agent in agents.items():
            files |= _written(self.folder.path, path, agent)
        name = f"{names.COMPLETIONS}/{round_name(record.round)}.jsonl"
        files |= self.folder.write(name, to_lines(samples))
        files |= self.folder.finish_metrics(record.round)
        self.folder.append_round(with_files(record, files))
        self._drop_requests(record)
        self.follow_up()
        _log.info("%s: round %d recorded", self.folder.path, record.round + 1)

    def _amend_round(self, record: RoundRecord) -> None:
        self.folder.amend_round(record)
        self._drop_requests(record)
        # The table shows which agents left.
        leaderboard.write_csv(self.folder.rounds(), self.folder.path)

    def _drop_requests(self, record: RoundRecord) -> None:
        """Remove requests with a recorded outcome; keep a request to pause until the pause ends."""
        ids = {outcome.request.id for outcome in record.steering} - {record.paused_by}
        steering.remove_requests(self.folder.path, ids)


def sees_folder(path: Path, team: Team) -> bool:
    """Return whether all ranks see the run folder; the first rank creates a file to test this."""
    if team.size == 1:
        return True
    name = f".{uuid4().hex}.tmp"
    if team.rank == 0:
        (path / name).touch()
    sign = path / team.first(name)
    visible = all(team.gather(sign.is_file()))
    if team.rank == 0:
        sign.unlink(missing_ok=True)
    return visible


@final
class RankWriter(RunWriter):
    """Writes the checkpoints of the agents of a rank other than the first.

    Args:
        folder: The run folder, which the first rank has locked.
        shared: Whether all ranks see the folder; otherwise the first rank receives the bytes.
        idle: Whether this rank writes nothing, because the first rank has all agents too.
    """

    def __init__(self, folder: Path, *, shared: bool, idle: bool = False) -> None:
        self.folder = folder
        self.shared = shared
        self.idle = idle
        self._copies: dict[str, Snapshot] = {}
        self._new: set[str] = set()

    def checkpoint(self, cohort: Cohort, round: int, slot: Slot) -> str | None:
        """Copy one agent to the CPU; `hand_over` writes its files."""
        path = checkpoint_name(round, slot)
        self._copies[path] = snapshot_again(cohort, slot, self._copies.get(path))
        self._new.add(path)
        return None if self.idle else path

    def hand_over(self) -> CheckpointFiles:
        """Write the checkpoints, or return them for the first rank to write."""
        agents = {path: self._copies[path] for path in sorted(self._new)}
        self._new.clear()
        if self.idle:
            return CheckpointFiles()
        if not self.shared:
            return CheckpointFiles(unwritten={p: agent.to_send() for p, agent in agents.items()})
        files: dict[str, str] = {}
        for path, agent in agents.items():
            files |= _written(self.folder, path, agent)
            sync_into(self.folder, self.folder / path)
        return CheckpointFiles(files)

    def round_over(self) -> None:
        """Drop the copies of agents."""
        self._copies.clear()


def with_files(record: RoundRecord, files: Mapping[str, str]) -> RoundRecord:
    """Return a record with `files`, SHA-256 by path, and with the digests of each agent's files."""
    agents = tuple(
        replace(
            agent,
            adapter_sha256=files.get(f"{agent.checkpoint}/{ACTOR_WEIGHTS}"),
            optimizer_sha256=files.get(f"{agent.checkpoint}/{OPTIMIZER}"),
        )
        for agent in record.agents
    )
    return replace(record, agents=agents, files=files)


def _written(folder: Path, name: str, agent: Snapshot) -> dict[str, str]:
    with writing(folder / name):
        digests = agent.write(folder / name)
    return {f"{name}/{file}": digest for file, digest in digests.items()}
