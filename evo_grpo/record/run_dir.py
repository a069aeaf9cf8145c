"""The folder of a run, from which a killed run can be resumed.

    population.yaml      the resolved configuration      journal.log      Optuna's trials, or
                                                         study.db         the same in SQLite
    inputs.json          digests of the run's inputs
    rounds.jsonl         one line per finished round     leaderboard.csv  one line per agent
    completions/         samples, a file per round       summary.json     written when the run ends
    metrics/             steps, a file per round         .lock            held while the run trains
    checkpoints/         a folder per round and agent    notes.jsonl      events outside of rounds
    readers/, trackers/  positions and output of readers
    compare/             the result of `evo-grpo run --compare`
    replay/              the result of `evo-grpo replay`
    steering/            pending requests of `evo-grpo steer`

A round is finished once its line in rounds.jsonl is complete; a resume removes the files of later
rounds. Paths inside the files are relative to the folder, so that the folder may be moved.
"""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from evo_grpo.errors import RunDirError
from evo_grpo.record.appending import MetricsFile, append, append_note
from evo_grpo.record.files import (
    FolderLock,
    atomic_write,
    is_temporary,
    seal,
    sync,
    sync_into,
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
    refuse_foreign,
    refuse_links_in_run,
    refuse_lost_lines,
    refuse_run,
    remove,
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
    LOCK,
    MEAN,
    METRICS,
    NOTES,
    OF_ROUNDS,
    REPLAY,
    ROUNDS,
    SUMMARY,
    WRITTEN_IN,
)
from evo_grpo.record.plain import open_plain
from evo_grpo.record.records import Amendment, outline, to_json
from evo_grpo.record.requests import last_number
from evo_grpo.record.summary import earlier_end, read_summary_of

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping, Sequence

    from evo_grpo.record.records import RoundRecord

#: The file of a checkpoint that is written last. It holds the digests of the other files.
ATTRIBUTES = "attributes.json"

_log = logging.getLogger(__name__)


@final
class RunDir:
    """A run folder that this process has locked; use it as a context manager, or call `close`.

    `create` and `open` construct it.

    Attributes:
        path: The folder.
        asked_before: Number of the last request to the run when this process locked the folder.
    """

    def __init__(self, path: Path, lock: FolderLock) -> None:
        self.path = path
        self.last_request = last_number(path)
        self._lock = lock
        self._rounds: list[RoundRecord] = []
        # Bytes of rounds.jsonl that hold these rounds; a truncated line may follow after a kill.
        self._length = 0
        self._metrics: MetricsFile | None = None

    @classmethod
    def create(
        cls, path: str | Path | None, name: str, resolved_yaml: str, *, force: bool = False
    ) -> RunDir:
        """Create the folder of a new run and lock it.

        Args:
            path: The folder, new or empty; None creates `runs/<name>-<n>` in the current folder.
            name: Name of the run; used only if `path` is None.
            resolved_yaml: The configuration with all defaults.
            force: Replace an existing run. In a folder that is not a run folder nothing is removed;
                a file with the name of one of a run's files is renamed.

        Raises:
            RunDirError: The folder is in use, or it is not empty and `force` is False.
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
            refuse_links_in_run(folder)
            if is_run(folder):
                if not force:
                    refuse_run(folder)
                clear_run(folder)
            else:
                move_aside(folder)
            # population.yaml last: it makes the folder a run folder.
            atomic_write(folder / ROUNDS, "")
            atomic_write(folder / CONFIG, resolved_yaml)
        except BaseException:  # including Ctrl-C: the folder must not stay locked
            lock.release()
            raise
        return cls(folder, lock)

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """Lock the folder of an existing run to continue it, without changing its files.

        Raises:
            RunNotFoundError: `path` is not a run folder.
            RunDirError: The folder is in use, was written by another version of this library, or
                has a link in place of one of its files.
            CheckpointError: A line of rounds.jsonl is damaged.
        """
        folder = expect_run(path)
        run = cls(folder, FolderLock(folder / LOCK))
        try:
            refuse_links_in_run(folder)
            run._rounds, run._length, _ = parse_rounds(folder / ROUNDS)
            refuse_lost_lines(folder, run._rounds)
        except BaseException:  # including Ctrl-C: the folder must not stay locked
            run.close()
            raise
        return run

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def announce_round(self, round: int) -> None:
        """Write the round that is being played to the lock file, for commands that make requests.

        A request that is made from now on waits for the end of this round.
        """
        self._lock.write_round(round)

    def rounds(self) -> list[RoundRecord]:
        """Return the finished rounds in order: outlines (see `outline`) and the whole last record.

        Right after `open` all records are whole.
        """
        return list(self._rounds)

    def append_round(self, record: RoundRecord) -> None:
        """Append a finished round to rounds.jsonl, after syncing its checkpoints to disk."""
        if record.round != len(self._rounds):
            raise RunDirError(
                f"{self.path}: expected round {len(self._rounds) + 1} next, got round "
                f"{record.round + 1}; record each round once, in order"
            )
        checkpoints = self.path / CHECKPOINTS / round_name(record.round)
        with writing(checkpoints):
            sync_into(self.path, checkpoints)
        self._append_line(seal(to_json(record)))
        self._rounds[-1:] = [outline(last) for last in self._rounds[-1:]]
        self._rounds.append(record)

    def amend_round(self, record: RoundRecord) -> None:
        """Append requests to the last round that were made after it was recorded."""
        if record.round != len(self._rounds) - 1:
            raise RunDirError(
                f"{self.path}: expected a change to the last round, {len(self._rounds)}, got one "
                f"to round {record.round + 1}; earlier rounds cannot be changed"
            )
        amendment = Amendment.of(record)
        self._append_line(seal(to_json(amendment)))
        self._rounds[-1] = amendment.applied(self._rounds[-1])

    def _append_line(self, text: str) -> None:
        path, line = self.path / ROUNDS, text.encode("utf-8", errors="replace")
        with writing(path), self._opened_rounds() as file:
            append(file, line, durable=True)
        self._length += len(line)

    def write_completions(self, round: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Write sample completions as JSON lines; return its SHA-256 by relative path."""
        path = self.path / COMPLETIONS / f"{round_name(round)}.jsonl"
        return {
            self.relative(path): atomic_write(path, "".join(to_line(row) + "\n" for row in rows))
        }

    def append_step(self, round: int, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the metrics of a step, a row per agent, to the metrics file of its round.

        Step 0 replaces an existing file.
        """
        if step == 0:
            self._metrics = MetricsFile(self.path / METRICS / f"{round_name(round)}.jsonl")
        assert self._metrics is not None, "steps are appended in order"
        self._metrics.append(rows)

    def finish_metrics(self) -> dict[str, str]:
        """Sync the round's metrics to disk; return its SHA-256 by relative path."""
        metrics, self._metrics = self._metrics, None
        return {} if metrics is None else {self.relative(metrics.path): metrics.finish()}

    def note(self, text: str) -> None:
        """Append a sentence with the present time to notes.jsonl."""
        append_note(self.path / NOTES, text)

    def relative(self, path: Path) -> str:
        """Return a path relative to the run folder with forward slashes, as records store it."""
        return path.relative_to(self.path).as_posix()

    def write_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Write inputs.json, the digests of the run's inputs."""
        atomic_write(self.path / INPUTS, seal(inputs))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, which marks the run as finished."""
        atomic_write(self.path / SUMMARY, seal(summary, indent=2))

    def write_config(self, resolved_yaml: str) -> None:
        """Replace population.yaml."""
        atomic_write(self.path / CONFIG, resolved_yaml)

    def reopen(self) -> None:
        """Turn a finished run into an unfinished one, so that it can play more rounds.

        The summary, the comparison and the replay are renamed to names with the number of rounds.
        The plan of the last round becomes that of the run. A second call has no further effect.
        """
        number = len(self._rounds)
        if not number or self._rounds[-1].plan is None:
            return
        for name in (COMPARE, REPLAY, SUMMARY):
            path = self.path / name
            if path.exists():
                with writing(path):
                    path.rename(path.with_name(f"{path.stem}.rounds-{number}{path.suffix}"))
        with writing(self.path):
            sync(self.path)
        remove(self.path / MEAN)
        self.amend_round(self._rounds[-1].extended())

    def earlier_ends(self) -> list[dict[str, Any]]:
        """Return the summaries from before each extension of the run, oldest first."""
        found = {
            int(match[1]): read_summary_of(path)
            for path in self.path.glob("summary.rounds-*.json")
            if (match := EARLIER.fullmatch(path.name))
        }
        return [earlier_end(end) for _, end in sorted(found.items()) if end is not None]

    def drop_unfinished(self) -> None:
        """Remove files that an interrupted run wrote after its last finished round.

        Call this after that round was restored; until then the files may be needed.
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
                    remove(entry)  # it may be gone: another process may have renamed its request

    def keep_best(self, checkpoint: str) -> None:
        """Copy a checkpoint to checkpoints/best, unless that holds it already."""
        source, target = self.path / checkpoint, self.path / BEST
        ours, theirs = target / ATTRIBUTES, source / ATTRIBUTES
        if not theirs.is_file():
            return  # deleted, or partly deleted before a kill, after it had been copied
        # Copied to another name, then renamed. After a kill there is the old folder, the new one,
        # or neither; a resume then repeats the copy from the checkpoint, which still exists.
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
            # On disk before the old copy and, later, the checkpoint itself are removed.
            sync(target.parent)
            shutil.rmtree(old, ignore_errors=True)

    def drop_checkpoints(self, kept: Collection[str]) -> None:
        """Remove the checkpoints of finished rounds except `kept`, paths as in the records."""
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
            if rest:  # nothing to sync otherwise
                with writing(folder):
                    sync(folder if folder.exists() else folder.parent)

    @contextmanager
    def _opened_rounds(self) -> Generator[FileIO]:
        """Open rounds.jsonl for appending, after removing a truncated last line."""
        path = self.path / ROUNDS
        # Unbuffered, so that closing the file after a failed write does not write the rest.
        with os.fdopen(open_plain(path, os.O_RDWR), "r+b", buffering=0) as file:
            rest = os.fstat(file.fileno()).st_size - self._length
            if rest < 0:
                raise RunDirError(
                    f"{path}: expected at least the {self._length} bytes that this process wrote, "
                    f"got {self._length + rest}; another program shortened it: restore the file"
                )
            if rest:
                _log.warning("%s: removed a truncated last line of %d bytes", path, rest)
                file.truncate(self._length)
            file.seek(max(self._length - 1, 0))
            if self._length and file.read(1) != b"\n":
                file.write(b"\n")
                self._length += 1
            yield file


def checkpoint_name(round: int, agent: int) -> str:
    """Return the path of an agent's checkpoint after a round, relative to the run folder."""
    return f"{CHECKPOINTS}/{round_name(round)}/agent-{agent:02d}"
