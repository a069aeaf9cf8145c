"""The folder of a run: every file in it is whole and checked, and together they allow a resume.

    population.yaml      the resolved configuration      journal.log      Optuna's trials, or
                                                         study.db         the same in SQLite
    inputs.json          digests of what it was made of
    rounds.jsonl         one line per finished round     leaderboard.csv  one line per agent
    completions/         samples, a file per round       summary.json     written when the run ends
    metrics/             each step, a file per round     .lock            held while the run goes on
    checkpoints/         a folder per round and agent    notes.jsonl      what belongs to no round
    readers/, trackers/  what follows the run wrote, and how far it is
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
    refuse_lost_lines,
    refuse_planted,
    refuse_run,
    remove,
    remove_journal_locks,
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
from evo_grpo.record.plain import MOST_BYTES_OF_LINES, open_plain, read_plain
from evo_grpo.record.records import Amendment, outline, to_json
from evo_grpo.record.requests import last_number
from evo_grpo.record.summary import earlier_end, read_summary_of

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping, Sequence

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
        asked_before: Number of the last request to it when this process locked it.
    """

    def __init__(self, path: Path, lock: FolderLock) -> None:
        self.path = path
        self.asked_before = last_number(path)
        self._lock = lock
        self._rounds: list[RoundRecord] = []
        # Bytes of rounds.jsonl that hold them; what follows was torn when its writer was killed.
        self._length = 0
        self._metrics: MetricsFile | None = None

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
            run._rounds, run._length, _ = parse_rounds(folder / ROUNDS)
            refuse_lost_lines(folder, run._rounds)
        except BaseException:  # Ctrl-C too: whatever ended it, the folder must not stay locked
            run.close()
            raise
        return run

    def close(self) -> None:
        """Release the folder."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tell_round(self, round: int) -> None:
        """Tell which round is being played, before its requests are those of the next one."""
        self._lock.tell(round)

    def rounds(self) -> list[RoundRecord]:
        """Return the finished rounds, first to last, before the last one as `outline` has them.

        Right after `open` all of them are whole.
        """
        return list(self._rounds)

    def append_round(self, record: RoundRecord) -> None:
        """Record a finished round; its checkpoints are synced to disk before its line is."""
        if record.round != len(self._rounds):
            raise RunDirError(
                f"{self.path}: expected round {len(self._rounds) + 1} next, got round "
                f"{record.round + 1}; rounds are recorded once and in order"
            )
        checkpoints = self.path / CHECKPOINTS / round_name(record.round)
        with writing(checkpoints):
            sync_into(self.path, checkpoints)
        self._append_line(seal(to_json(record)))
        self._rounds[-1:] = [outline(last) for last in self._rounds[-1:]]
        self._rounds.append(record)

    def amend_round(self, record: RoundRecord) -> None:
        """Record the last round anew, with what a person asked for once it had been recorded."""
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
            append(file, line, durable=True)
        self._length += len(line)

    def write_completions(self, round: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Write sample completions as JSON lines; returns the SHA-256 by the path in the folder."""
        path = self.path / COMPLETIONS / f"{round_name(round)}.jsonl"
        return {
            self.relative(path): atomic_write(path, "".join(to_line(row) + "\n" for row in rows))
        }

    def append_step(self, round: int, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append what a step measured, a row per agent, to the metrics of its round.

        Step 0 begins the file anew.
        """
        if step == 0:
            self._metrics = MetricsFile(self.path / METRICS / f"{round_name(round)}.jsonl")
        assert self._metrics is not None, "steps are appended in order"
        self._metrics.append(rows)

    def finish_metrics(self) -> dict[str, str]:
        """Wait until the metrics of the round are on disk; returns their SHA-256 by path."""
        metrics, self._metrics = self._metrics, None
        return {} if metrics is None else {self.relative(metrics.path): metrics.finish()}

    def note(self, text: str) -> None:
        """Append a sentence that belongs to no round to notes.jsonl, with the time."""
        append_note(self.path / NOTES, text)

    def relative(self, path: Path) -> str:
        """Return a path as in the records: relative to the run folder, with forward slashes."""
        return path.relative_to(self.path).as_posix()

    def write_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Write inputs.json: what the run is made of."""
        atomic_write(self.path / INPUTS, seal(inputs))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, which marks the run as finished."""
        atomic_write(self.path / SUMMARY, to_line(summary, indent=2) + "\n")

    def write_config(self, resolved_yaml: str) -> None:
        """Write the resolved configuration anew."""
        atomic_write(self.path / CONFIG, resolved_yaml)

    def reopen(self, last: RoundRecord) -> None:
        """Make a run that had come to its end one that goes on.

        What belongs to that end is set aside under a name with the number of its rounds: the
        summary, a comparison, a replay. Once more after a kill changes nothing. `last` is the last
        round with a plan for the next one.
        """
        number = len(self._rounds)
        for name in (COMPARE, REPLAY, SUMMARY):
            path = self.path / name
            if path.exists():
                with writing(path):
                    path.rename(path.with_name(f"{path.stem}.rounds-{number}{path.suffix}"))
        with writing(self.path):
            sync(self.path)
        remove(self.path / MEAN)
        # Without what was asked for after the round, which stands in lines of its own below it.
        place = parse_rounds(self.path / ROUNDS).places[-1]
        before = read_plain(self.path / ROUNDS, MOST_BYTES_OF_LINES)[:place].decode("utf-8")
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
        return [earlier_end(end) for _, end in sorted(found.items()) if end is not None]

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
                    remove(entry)  # if it is there: a request may be whole by now
        remove_journal_locks(self.path)

    def keep_best(self, checkpoint: str) -> None:
        """Copy a checkpoint to checkpoints/best, where it is not there already."""
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
            # Before the copy that it replaces and, later, the checkpoint itself are removed.
            sync(target.parent)
            shutil.rmtree(old, ignore_errors=True)

    def drop_checkpoints(self, kept: Collection[str]) -> None:
        """Remove the checkpoints of finished rounds but those to keep, as records name them."""
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
            if rest:  # a finished run is not looked through again
                with writing(folder):
                    sync(folder if folder.exists() else folder.parent)

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
