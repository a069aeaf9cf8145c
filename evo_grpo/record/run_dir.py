"""The folder of a run: every file in it is whole and checked, and together they allow a resume.

    population.yaml      the resolved configuration      journal.log      Optuna's trials
    rounds.jsonl         one line per finished round     leaderboard.csv  one line per agent
    completions/         samples, a file per round       summary.json     written when the run ends
    checkpoints/         a folder per round and agent    .lock            held while the run goes on
    compare/             what `evo-grpo run --compare` adds to a finished run
    replay/              what `evo-grpo replay` adds to a finished run

A round is finished when its line in rounds.jsonl is: files of later rounds are dropped before a
resume. Paths inside the files are relative to the folder, so that it may be moved.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from evo_grpo.errors import RunDirError
from evo_grpo.record.files import (
    FolderLock,
    atomic_write,
    is_temporary,
    seal,
    sync_tree,
    to_line,
    writing,
)
from evo_grpo.record.folder import (
    clear_run,
    expect_run,
    fresh_folder,
    is_run,
    make_folder,
    move_aside,
    parse_rounds,
    read_summary,
    refuse_foreign,
    refuse_run,
    remove,
    round_entries,
    round_name,
)
from evo_grpo.record.names import (
    BEST,
    CHECKPOINTS,
    COMPLETIONS,
    CONFIG,
    JOURNAL,
    LEADERBOARD,
    LOCK,
    ROUNDS,
    SUMMARY,
)
from evo_grpo.record.records import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from evo_grpo.record.records import RoundRecord

#: The file of a checkpoint that is written last, and that holds the digests of the others.
ATTRIBUTES = "attributes.json"

_log = logging.getLogger(__name__)


@final
class RunDir:
    """A run folder locked by this process; use it as a context manager, or call `close`.

    `create` and `open` return one.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path, lock: FolderLock) -> None:
        self.path = path
        self._lock = lock
        self._rounds: list[RoundRecord] = []

    @classmethod
    def create(
        cls, path: str | Path | None, name: str, resolved_yaml: str, *, force: bool = False
    ) -> RunDir:
        """Create the folder of a new run and lock it.

        Args:
            path: The folder, new or empty; None takes a fresh `runs/<name>-<n>` below the current
                folder.
            name: Name of the run; only used when `path` is None.
            resolved_yaml: The configuration with every default filled in.
            force: Replace a run. In a folder that is no run nothing is removed; a file that has the
                name of one of a run's files is renamed.

        Raises:
            RunDirError: When the folder is in use, or holds something and `force` is off.
        """
        folder = fresh_folder(name, Path("runs")) if path is None else Path(path)
        if folder.exists() and not folder.is_dir():
            raise RunDirError(
                f"{folder}: expected a folder for the run, found a file; choose another --out"
            )
        if not force:
            refuse_foreign(folder)
        make_folder(folder)
        lock = FolderLock(folder / LOCK)
        try:
            if is_run(folder):
                if not force:
                    refuse_run(folder)
                clear_run(folder)
            else:
                move_aside(folder)
            # population.yaml last: with it the folder becomes a run.
            atomic_write(folder / ROUNDS, "")
            atomic_write(folder / CONFIG, resolved_yaml)
        except BaseException:  # Ctrl-C too: whatever ended it, the folder must not stay locked
            lock.release()
            raise
        return cls(folder, lock)

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """Lock an existing run to go on with it; a torn last line of rounds.jsonl is dropped.

        Raises:
            RunNotFoundError: When it is no run folder.
            RunDirError: When it is in use, or written by another version of this library.
            CheckpointError: When a line of rounds.jsonl is damaged.
        """
        folder = expect_run(path)
        run = cls(folder, FolderLock(folder / LOCK))
        try:
            run._rounds, length = parse_rounds(folder / ROUNDS)
            run._repair(length)
        except BaseException:  # Ctrl-C too: whatever ended it, the folder must not stay locked
            run.close()
            raise
        return run

    def close(self) -> None:
        """Release the folder."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def journal(self) -> Path:
        """Path of Optuna's journal."""
        return self.path / JOURNAL

    @property
    def leaderboard(self) -> Path:
        """Path of the leaderboard."""
        return self.path / LEADERBOARD

    def config_text(self) -> str:
        """Return the resolved configuration as it was written."""
        return (self.path / CONFIG).read_text(encoding="utf-8")

    def rounds(self) -> list[RoundRecord]:
        """Return the finished rounds, first to last."""
        return list(self._rounds)

    def append_round(self, record: RoundRecord) -> None:
        """Record a finished round; its checkpoints are synced to disk before its line is.

        Raises:
            RunDirError: When it is not the next round.
            RunFailedError: When it cannot be written; no part of a line is left.
        """
        if record.round != len(self._rounds):
            raise RunDirError(
                f"{self.path}: expected round {len(self._rounds)} next, got round {record.round}; "
                "rounds are recorded once and in order"
            )
        path = self.path / ROUNDS
        with writing(path):
            sync_tree(self.path / CHECKPOINTS / round_name(record.round))
            with path.open("ab") as file:
                length = file.tell()
                try:
                    file.write(seal(to_json(record)).encode("utf-8", errors="replace"))
                    file.flush()
                    os.fsync(file.fileno())
                except BaseException:  # Ctrl-C too: no part of a line may stay in the file
                    os.truncate(path, length)
                    raise
        self._rounds.append(record)

    def write_completions(self, round: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Write sample completions of a round as JSON lines and return the file.

        Args:
            round: The round (0-based).
            rows: One mapping per completion; values that JSON cannot hold are written as strings.
        """
        path = self.path / COMPLETIONS / f"{round_name(round)}.jsonl"
        atomic_write(path, "".join(to_line(row) + "\n" for row in rows))
        return path

    def checkpoint_path(self, round: int, agent: int) -> Path:
        """Return the folder for an agent's checkpoint after a round, without creating it."""
        return self.path / CHECKPOINTS / round_name(round) / f"agent-{agent:02d}"

    def relative(self, path: Path) -> str:
        """Return a path as in the records: relative to the run folder, with forward slashes."""
        return path.relative_to(self.path).as_posix()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, which marks the run as finished."""
        atomic_write(self.path / SUMMARY, to_line(summary, indent=2) + "\n")

    def summary(self) -> dict[str, Any] | None:
        """Return the contents of summary.json, or None before the run's end."""
        return read_summary(self.path)

    def drop_after(self, round: int) -> None:
        """Remove the files that an interrupted run left of rounds after the last finished one.

        Args:
            round: The last finished round, -1 when there is none.

        Raises:
            RunDirError: When a later round is finished: finished work is never dropped.
        """
        if len(self._rounds) > round + 1:
            raise RunDirError(
                f"{self.path}: cannot drop the rounds after round {round}, "
                f"since round {len(self._rounds) - 1} is finished; give {len(self._rounds) - 1}"
            )
        for name in (COMPLETIONS, CHECKPOINTS):
            for number, path in round_entries(self.path / name):
                if number > round:
                    remove(path)
        for folder in (self.path, self.path / COMPLETIONS):
            for path in folder.glob(".*"):
                if is_temporary(path):
                    path.unlink()

    def keep_best(self, checkpoint: str) -> None:
        """Copy a checkpoint to checkpoints/best, where it is not there already.

        Args:
            checkpoint: Its path in the records.

        Raises:
            RunFailedError: When it cannot be written.
        """
        source, target = self.path / checkpoint, self.path / BEST
        if not source.is_dir():
            return  # deleted since, and kept when it was the best
        ours, theirs = target / ATTRIBUTES, source / ATTRIBUTES
        if ours.is_file() and ours.read_bytes() == theirs.read_bytes():
            return
        # Written aside, then renamed: a kill leaves the old folder, the new one, or none of them
        # beside a checkpoint from which this is repeated.
        new, old = target.with_name(".best-new"), target.with_name(".best-old")
        with writing(target):
            for aside in (new, old):
                shutil.rmtree(aside, ignore_errors=True)
            shutil.copytree(source, new)
            sync_tree(new)
            if target.exists():
                target.rename(old)
            new.rename(target)
            shutil.rmtree(old, ignore_errors=True)

    def drop_checkpoints_before(self, round: int) -> None:
        """Remove the checkpoints of earlier rounds, where only the last ones are kept."""
        for number, path in round_entries(self.path / CHECKPOINTS):
            if number < round:
                remove(path)
                _log.debug("%s: checkpoints of round %d dropped", self.path, number)

    def _repair(self, length: int) -> None:
        path = self.path / ROUNDS
        with writing(path), path.open("r+b") as file:
            torn = path.stat().st_size - length
            if torn:
                _log.warning("%s: dropped a torn last line of %d bytes", path, torn)
            file.truncate(length)
            if length:
                file.seek(length - 1)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.flush()
            os.fsync(file.fileno())
