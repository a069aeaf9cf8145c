"""The folder of a run: every file in it is whole and checked, and together they allow a resume.

    population.yaml      the resolved configuration      journal.log      Optuna's trials, or
                                                         study.db         the same in SQLite
    inputs.json          digests of what it was made of
    rounds.jsonl         one line per finished round     leaderboard.csv  one line per agent
    completions/         samples, a file per round       summary.json     written when the run ends
    metrics/             each step, a file per round     .lock            held while the run goes on
    checkpoints/         a folder per round and agent
    trackers/            what trackers of the run wrote
    compare/             what `evo-grpo run --compare` adds to a finished run
    replay/              what `evo-grpo replay` adds to a finished run
    steering/            what `evo-grpo steer` asks of the run, until it is carried out

A round is finished when its line in rounds.jsonl is: files of later rounds are dropped before a
resume. Paths inside the files are relative to the folder, so that it may be moved.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from contextlib import AbstractContextManager, ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, final

from evo_grpo.errors import CheckpointError, RunDirError
from evo_grpo.record.files import (
    FolderLock,
    atomic_write,
    is_temporary,
    seal,
    sync_tree,
    to_line,
    unseal,
    writing,
)
from evo_grpo.record.folder import (
    clear_run,
    config_text,
    expect_run,
    fresh_folder,
    is_run,
    make_folder,
    move_aside,
    parse_rounds,
    refuse_foreign,
    refuse_planted,
    refuse_run,
    remove,
    remove_foreign_lock,
    remove_released_locks,
    round_entries,
    round_name,
)
from evo_grpo.record.names import (
    BEST,
    CHECKPOINTS,
    COMPARE,
    COMPLETIONS,
    CONFIG,
    EARLIER,
    INPUTS,
    JOURNAL,
    LEADERBOARD,
    LOCK,
    MEAN,
    METRICS,
    OF_ROUNDS,
    REPLAY,
    ROUNDS,
    STUDY,
    STUDY_ASIDES,
    SUMMARY,
    WRITTEN_IN,
)
from evo_grpo.record.plain import open_plain, read_plain
from evo_grpo.record.records import Amendment, outline, to_json
from evo_grpo.record.summary import read_summary, read_summary_of

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping, Sequence
    from types import TracebackType

    from evo_grpo.record.records import RoundRecord

#: The file of a checkpoint that is written last, and that holds the digests of the others.
ATTRIBUTES = "attributes.json"

_log = logging.getLogger(__name__)

T = TypeVar("T")


@final
class RunDir:
    """A run folder locked by this process; use it as a context manager, or call `close`.

    `create` and `open` return one.

    Attributes:
        path: The folder.
        since: When this process locked it, in seconds since 1970 (UTC).
    """

    def __init__(self, path: Path, lock: FolderLock) -> None:
        self.path = path
        self.since = time.time()
        self._lock = lock
        self._rounds: list[RoundRecord] = []
        # Bytes of rounds.jsonl that hold them; what follows was torn when its writer was killed.
        self._length = 0
        self._kept = ExitStack()

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
            refuse_planted(folder)
            remove_foreign_lock(folder)
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
        """Lock an existing run to go on with it; nothing in it is changed yet.

        Raises:
            RunNotFoundError: When it is no run folder.
            RunDirError: When it is in use, written by another version of this library, or holds a
                link where its own files belong.
            CheckpointError: When a line of rounds.jsonl is damaged.
        """
        folder = expect_run(path)
        run = cls(folder, FolderLock(folder / LOCK))
        try:
            refuse_planted(folder)
            remove_foreign_lock(folder)
            run._rounds, run._length = parse_rounds(folder / ROUNDS)
            run._refuse_lost_lines()
        except BaseException:  # Ctrl-C too: whatever ended it, the folder must not stay locked
            run.close()
            raise
        return run

    def keep(self, context: AbstractContextManager[T]) -> T:
        """Enter a context that ends right before the folder is released."""
        return self._kept.enter_context(context)

    def close(self) -> None:
        """Release the folder."""
        try:
            self._kept.close()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._kept.__exit__(kind, error, traceback)
        finally:
            self._lock.release()

    def tell_round(self, round: int) -> None:
        """Tell which round is being played, before its requests are those of the next one."""
        self._lock.tell(round)

    @property
    def journal(self) -> Path:
        """Path of Optuna's journal."""
        return self.path / JOURNAL

    @property
    def study(self) -> Path:
        """Path of Optuna's SQLite file."""
        return self.path / STUDY

    @property
    def leaderboard(self) -> Path:
        """Path of the leaderboard."""
        return self.path / LEADERBOARD

    def config_text(self) -> str:
        """Return the resolved configuration as it was written."""
        return config_text(self.path)

    @property
    def length(self) -> int:
        """Bytes of rounds.jsonl that hold the finished rounds."""
        return self._length

    def rounds(self) -> list[RoundRecord]:
        """Return the finished rounds, first to last, before the last one as `outline` has them.

        Right after `open` all of them are whole.
        """
        return list(self._rounds)

    def append_round(self, record: RoundRecord) -> None:
        """Record a finished round; its checkpoints are synced to disk before its line is.

        Raises:
            RunDirError: When it is not the next round.
            RunFailedError: When it cannot be written; no part of a line is left.
        """
        if record.round != len(self._rounds):
            raise RunDirError(
                f"{self.path}: expected round {len(self._rounds) + 1} next, got round "
                f"{record.round + 1}; rounds are recorded once and in order"
            )
        with writing(self.path / ROUNDS):
            sync_tree(self.path / CHECKPOINTS / round_name(record.round))
        self._append_line(seal(to_json(record)))
        self._rounds[-1:] = [outline(last) for last in self._rounds[-1:]]
        self._rounds.append(record)

    def amend_round(self, record: RoundRecord) -> None:
        """Record what a person asked for once the last round had been recorded.

        Args:
            record: That round, as it is from now on.

        Raises:
            RunDirError: It is another round.
            RunFailedError: It cannot be written; no part of a line is left.
        """
        if record.round != len(self._rounds) - 1:
            raise RunDirError(
                f"{self.path}: expected round {len(self._rounds) - 1}, the last one, to be "
                f"amended, got round {record.round}; the rounds that follow it rest on it"
            )
        amendment = Amendment.of(record)
        self._append_line(seal(to_json(amendment)))
        self._rounds[-1] = amendment.applied(self._rounds[-1])

    def _append_line(self, text: str) -> None:
        path, line = self.path / ROUNDS, text.encode("utf-8", errors="replace")
        with writing(path), self._opened_rounds() as file:
            length = file.tell()
            try:
                _write_whole(file, line)
                os.fsync(file.fileno())
            except BaseException:  # Ctrl-C too: no part of a line may stay in the file
                os.ftruncate(file.fileno(), length)
                raise
        self._length = length + len(line)

    def write_completions(self, round: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Write sample completions of a round as JSON lines.

        Args:
            round: The round (0-based).
            rows: One mapping per completion; values that JSON cannot hold are written as strings.

        Returns:
            The SHA-256 of the file, by its path in the folder.
        """
        return self._write_lines(COMPLETIONS, round, rows)

    def write_metrics(self, round: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Write what the steps of a round measured as JSON lines.

        Args:
            round: The round (0-based).
            rows: One mapping per step and agent; a number that is not finite is written as null.

        Returns:
            The SHA-256 of the file, by its path in the folder.
        """
        return self._write_lines(METRICS, round, rows)

    def _write_lines(
        self, folder: str, round: int, rows: Sequence[Mapping[str, Any]]
    ) -> dict[str, str]:
        path = self.path / folder / f"{round_name(round)}.jsonl"
        return {
            self.relative(path): atomic_write(path, "".join(to_line(row) + "\n" for row in rows))
        }

    def checkpoint_path(self, round: int, agent: int) -> Path:
        """Return the folder for an agent's checkpoint after a round, without creating it."""
        return self.path / checkpoint_name(round, agent)

    def relative(self, path: Path) -> str:
        """Return a path as in the records: relative to the run folder, with forward slashes."""
        return path.relative_to(self.path).as_posix()

    def write_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Write inputs.json: what the run is made of."""
        atomic_write(self.path / INPUTS, seal(inputs))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, which marks the run as finished."""
        atomic_write(self.path / SUMMARY, to_line(summary, indent=2) + "\n")

    def summary(self) -> dict[str, Any] | None:
        """Return the contents of summary.json, or None before the run's end."""
        return read_summary(self.path)

    def write_config(self, resolved_yaml: str) -> None:
        """Write the resolved configuration anew."""
        atomic_write(self.path / CONFIG, resolved_yaml)

    def reopen(self, last: RoundRecord) -> None:
        """Make a run that had come to its end one that goes on.

        What belongs to that end is set aside under a name with the number of its rounds: the
        summary, a comparison, a replay. Once more after a kill changes nothing.

        Args:
            last: The last round, with a plan for the next one.
        """
        number = len(self._rounds)
        for name in (COMPARE, REPLAY, SUMMARY):
            path = self.path / name
            if path.exists():
                with writing(path):
                    path.rename(path.with_name(f"{path.stem}.rounds-{number}{path.suffix}"))
        # Optuna would take the mean of the end so far for a parent of those that follow.
        for name in (JOURNAL, STUDY, *STUDY_ASIDES, MEAN):
            remove(self.path / name)
        lines = read_plain(self.path / ROUNDS).splitlines(keepends=True)
        # What was asked for after a round stands in lines of its own, below that of the round.
        own = [place for place, line in enumerate(lines) if "amends" not in unseal(line)]
        before = b"".join(lines[: own[number - 1]]).decode("utf-8")
        atomic_write(self.path / ROUNDS, before + seal(to_json(last)))
        self._rounds[-1] = last
        self._length = (self.path / ROUNDS).stat().st_size

    def earlier_ends(self) -> list[dict[str, Any]]:
        """Return how the run had ended before it was given more rounds, the first end first."""
        found = {
            int(match[1]): read_summary_of(path)
            for path in self.path.glob("summary.rounds-*.json")
            if (match := EARLIER.fullmatch(path.name))
        }
        names = ("rounds", "base", "best", "gain", "gain_se")
        return [{name: found[number][name] for name in names} for number in sorted(found)]

    def drop_unfinished(self) -> None:
        """Remove what an interrupted run left after its last finished round.

        To be called once that round is restored: what is dropped here may be all there is.
        """
        path = self.path / ROUNDS
        with writing(path), self._opened_rounds() as file:
            os.fsync(file.fileno())
        for name in OF_ROUNDS:
            for number, entry in round_entries(self.path / name):
                if number >= len(self._rounds):
                    remove(entry)
        for folder in (self.path, *(self.path / name for name in WRITTEN_IN)):
            for entry in folder.glob(".*"):
                if is_temporary(entry):
                    entry.unlink(missing_ok=True)  # a request may be whole by now
        remove_released_locks(self.path)

    def keep_best(self, checkpoint: str) -> None:
        """Copy a checkpoint to checkpoints/best, where it is not there already.

        Args:
            checkpoint: Its path in the records.

        Raises:
            RunFailedError: When it cannot be written.
        """
        source, target = self.path / checkpoint, self.path / BEST
        ours, theirs = target / ATTRIBUTES, source / ATTRIBUTES
        if not theirs.is_file():
            return  # deleted since, or half of it before a kill, and kept when it was the best
        # Written aside, then renamed: a kill leaves the old folder, the new one, or none of them
        # beside a checkpoint from which this is repeated.
        new, old = target.with_name(".best-new"), target.with_name(".best-old")
        with writing(target):
            for aside in (new, old):
                shutil.rmtree(aside, ignore_errors=True)
            if ours.is_file() and ours.read_bytes() == theirs.read_bytes():
                return
            shutil.copytree(source, new)
            sync_tree(new)
            if target.exists():
                target.rename(old)
            new.rename(target)
            shutil.rmtree(old, ignore_errors=True)

    def drop_checkpoints(self, kept: Collection[str]) -> None:
        """Remove the checkpoints of finished rounds that are not to stay.

        Args:
            kept: Those that stay, by their paths in the records.
        """
        for number, folder in round_entries(self.path / CHECKPOINTS):
            if number >= len(self._rounds):
                continue
            rest = [path for path in folder.iterdir() if self.relative(path) not in kept]
            for path in rest:
                remove(path)
            if rest:
                _log.debug(
                    "%s: %d checkpoints of round %d dropped", self.path, len(rest), number + 1
                )
            if not any(folder.iterdir()):
                remove(folder)

    def _refuse_lost_lines(self) -> None:
        """Refuse rounds.jsonl where it has lost lines, for a resume would drop what they recorded.

        A kill leaves files of the one round after the last line at most, and before that line's
        round is recorded nothing of the round before it is removed.
        """
        found = {number for number, _ in round_entries(self.path / CHECKPOINTS)}
        finished = len(self._rounds)
        kept = not finished or finished - 1 in found or self._rounds[-1].unsaved
        if max(found, default=-1) > finished or (finished in found and not kept):
            raise CheckpointError(
                f"{self.path / ROUNDS}: expected the line of round {max(found) + 1}, whose "
                f"checkpoints are there, got {finished} whole lines; it was cut after it had been "
                "written: put it back as it was, from a copy"
            )

    @contextmanager
    def _opened_rounds(self) -> Generator[FileIO]:
        """Open rounds.jsonl at its end, where the next line goes; a torn line is cut off."""
        path = self.path / ROUNDS
        # Unbuffered: after a failed write nothing may be left to be written when it is closed.
        with os.fdopen(open_plain(path, os.O_RDWR), "r+b", buffering=0) as file:
            rest = os.fstat(file.fileno()).st_size - self._length
            if rest < 0:
                raise RunDirError(
                    f"{path}: expected at least {self._length} bytes as this process left them, "
                    f"got {self._length + rest}; something else shortened it: put it back as it was"
                )
            if rest:
                _log.warning("%s: dropped a torn last line of %d bytes", path, rest)
                file.truncate(self._length)
            file.seek(max(self._length - 1, 0))
            if self._length and file.read(1) != b"\n":
                file.write(b"\n")
                self._length += 1
            yield file


def checkpoint_name(round: int, agent: int) -> str:
    """Return the path of an agent's checkpoint after a round, as the records have it."""
    return f"{CHECKPOINTS}/{round_name(round)}/agent-{agent:02d}"


def _write_whole(file: FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
