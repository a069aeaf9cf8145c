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

import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, Literal, final

from evo_grpo.errors import CheckpointError, EvoGrpoError, RunDirError
from evo_grpo.record import files, names, plain, steering
from evo_grpo.record import folder as run_folder
from evo_grpo.record.family import best_agent, best_ever, front
from evo_grpo.record.records import Amendment, RoundRecord, outline, to_json

Retention = Literal["all", "last", "best"] | int
"""Checkpoints to keep: of all rounds ("all"); of the last round ("last"); of the last round and of
each earlier round's best agent ("best"); of the last n rounds (n). Every policy keeps the
checkpoints that a resume needs, and those of the best agent ever and of the front."""


@final
class RunDir(AbstractContextManager["RunDir"]):
    """A run folder that this process has locked until `close`; `create` and `open` construct it.

    Attributes:
        lock: Lock of the folder; the lock file has the number of the round that is played.
        earlier_requests: Ids of the requests that were pending when this process locked the folder.
    """

    def __init__(self, path: Path, lock: files.FolderLock) -> None:
        self.path, self.lock = path, lock
        self.earlier_requests = steering.ids_of_requests(path)
        self._rounds: list[RoundRecord] = []

    @classmethod
    def create(
        cls, path: str | Path | None, name: str, resolved_yaml: str, *, force: bool = False
    ) -> RunDir:
        """Create the folder of a new run and lock it.

        A `path` of None stands for `runs/<name>-<n>` in the current folder. `force` replaces an
        existing run, or writes the run beside files with other names.

        Raises:
            RunDirError: The folder is in use, or it is not empty and `force` is False.
        """
        folder = Path("runs" if path is None else path)
        if path is not None:
            refuse_taken(folder, force=force)
        try:
            files.create_folder(folder)
            if path is None:
                folder = _numbered(folder, name)
            lock = files.FolderLock(folder / names.LOCK)
        except EvoGrpoError:
            raise
        except OSError as error:
            raise RunDirError(
                f"{folder}: cannot be written ({error.strerror}); make room or give permission, "
                "or choose another --out"
            ) from error
        with ExitStack() as undo:  # after an error or Ctrl-C the folder must not stay locked
            undo.callback(lock.release)
            run_folder.refuse_links_in_run(folder)
            refuse_taken(folder, force=force)  # another process may have begun a run there
            if run_folder.is_run(folder):
                clear_run(folder)
            # population.yaml last: it makes the folder a run folder.
            files.atomic_write(folder / names.ROUNDS, "")
            files.atomic_write(folder / names.CONFIG, resolved_yaml)
            undo.pop_all()
        return cls(folder, lock)

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """Lock the folder of an existing run to continue it, without changing its files.

        Raises:
            RunDirError: The folder is in use, was written by another version of this library, or
                has a link in place of one of its files.
            CheckpointError: A line of rounds.jsonl is damaged or lost.
        """
        folder = run_folder.expect_run(path)
        with files.writing(folder):
            run = cls(folder, files.FolderLock(folder / names.LOCK))
        with ExitStack() as undo:
            undo.callback(run.close)
            run_folder.refuse_links_in_run(folder)
            run._rounds = run_folder.parse_rounds(folder / names.ROUNDS).records
            refuse_lost_lines(folder, run._rounds)
            undo.pop_all()
        return run

    def close(self) -> None:
        """Unlock the folder."""
        self.lock.release()

    def __exit__(self, *_: object) -> None:
        self.close()

    def rounds(self) -> list[RoundRecord]:
        """Return the finished rounds; each becomes an `outline` when the next is appended."""
        return list(self._rounds)

    def append_round(self, record: RoundRecord) -> None:
        """Append the next finished round to rounds.jsonl, after syncing its checkpoints to disk."""
        assert record.round == len(self._rounds), "each round is recorded once, in order"
        files.sync_into(
            self.path, self.path / names.CHECKPOINTS / run_folder.round_name(record.round)
        )
        files.append(self.path / names.ROUNDS, files.seal(to_json(record)))
        self._rounds[-1:] = [outline(previous) for previous in self._rounds[-1:]]
        self._rounds.append(record)

    def amend_round(self, record: RoundRecord) -> None:
        """Append to rounds.jsonl what changed in the last round, whose new record is `record`.

        Requests change the record, and so does an extension, which applies its plan.
        """
        assert record.round == len(self._rounds) - 1, "only the last round can be changed"
        amendment = Amendment.of(record)
        files.append(self.path / names.ROUNDS, files.seal(to_json(amendment)))
        self._rounds[-1] = amendment.applied(self._rounds[-1])

    def append_step(self, round: int, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the metrics of a step, a row per agent; before step 0, remove the round's file."""
        file = self._metrics(round)
        if step == 0:
            files.remove(file)
        files.append(file, files.to_lines(rows), durable=False)

    def finish_metrics(self, round: int) -> dict[str, str]:
        """Sync the metrics file of a round, if any, and return its SHA-256 by its relative path."""
        file = self._metrics(round)
        with files.writing(file):
            digest = plain.sha256_of(file)
            if digest is None:
                return {}
            files.sync(file)
            files.sync(file.parent)
        return {file.relative_to(self.path).as_posix(): digest}

    def _metrics(self, round: int) -> Path:
        return self.path / names.METRICS / f"{run_folder.round_name(round)}.jsonl"

    def note(self, text: str) -> None:
        """Append a sentence with the present time to notes.jsonl."""
        files.append(self.path / names.NOTES, files.to_lines([{"time": time.time(), "text": text}]))

    def write(self, name: str, text: str) -> dict[str, str]:
        """Replace a file of the run atomically; return its SHA-256 by its relative path."""
        return {name: files.atomic_write(self.path / name, text)}

    def reopen(self) -> None:
        """Turn a finished run into an unfinished run that continues with the last round's plan.

        Result files are renamed, with the number of rounds as suffix. A second call does nothing.
        """
        number = len(self._rounds)
        if not number or self._rounds[-1].plan is None:
            return
        for name in (names.COMPARE, names.REPLAY, names.SUMMARY):
            path = self.path / name
            if path.exists():
                with files.writing(path):
                    path.rename(path.with_name(f"{path.stem}.rounds-{number}{path.suffix}"))
        with files.writing(self.path):
            files.sync(self.path)
        files.remove(self.path / names.MEAN)
        self.amend_round(self._rounds[-1].extended())

    def drop_unfinished(self) -> None:
        """Remove the files of unfinished rounds, once the last finished round has been restored."""
        files.append(self.path / names.ROUNDS, "")
        for name in names.OF_ROUNDS:
            for number, entry in run_folder.round_entries(self.path / name):
                if number >= len(self._rounds):
                    files.remove(entry)
        for name in (".", names.COMPLETIONS, names.METRICS, names.STEERING):
            for entry in (self.path / name).glob(".*"):
                if files.is_temporary(entry):
                    # It may be gone: another process may have renamed its request.
                    files.remove(entry)

    def keep_best(self) -> None:
        """Copy the best agent's checkpoint to checkpoints/best, unless that is up to date."""
        best = best_ever(self._rounds)
        if best is None or best.checkpoint is None:
            return
        source, target = self.path / best.checkpoint, self.path / names.BEST
        copied, original = target / names.ATTRIBUTES, source / names.ATTRIBUTES
        if not original.is_file():
            return  # deleted, or partly deleted before a kill, after it had been copied
        # Copied to another name, then renamed. After a kill there is the old folder, the new one,
        # or neither; a resume then repeats the copy from the checkpoint, which still exists.
        new, old = (self.path / name for name in names.ASIDES)
        with files.writing(target):
            for aside in (new, old):
                files.remove(aside)
            if copied.is_file() and copied.read_bytes() == original.read_bytes():
                return
            shutil.copytree(source, new)
            files.sync_tree(new)
            if target.exists():
                target.rename(old)
            new.rename(target)
            # On disk before the old copy and, later, the checkpoint itself are removed.
            files.sync(target.parent)
            files.remove(old)

    def drop_checkpoints(self, policy: Retention) -> None:
        """Remove the checkpoints of finished rounds that a policy does not keep."""
        keep = kept_checkpoints(self._rounds, policy)
        for number, folder in run_folder.round_entries(self.path / names.CHECKPOINTS):
            if number >= len(self._rounds):
                continue
            paths = list(folder.iterdir())
            dropped = [path for path in paths if path.relative_to(self.path).as_posix() not in keep]
            for path in [folder] if dropped == paths else dropped:
                files.remove(path)
            if dropped:
                with files.writing(folder):
                    files.sync(folder if folder.exists() else folder.parent)


def checkpoint_name(round: int, agent: int) -> str:
    """Return the path of an agent's checkpoint after a round, relative to the run folder."""
    return f"{names.CHECKPOINTS}/{run_folder.round_name(round)}/agent-{agent:02d}"


def _numbered(parent: Path, name: str) -> Path:
    """Create and return `<parent>/<name>-<n>`, with n one above the greatest number in use."""
    stem = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "run"
    pattern = re.compile(re.escape(stem) + r"-(\d+)")
    matches = map(pattern.fullmatch, (path.name for path in parent.iterdir()))
    number = max((int(match[1]) for match in matches if match), default=0)
    while True:
        number += 1
        folder = parent / f"{stem}-{number}"
        with suppress(FileExistsError):  # another process took the number
            folder.mkdir()
            files.sync_names(parent)
            return folder


def refuse_taken(folder: Path, *, force: bool = False) -> None:
    """Raise RunDirError for a folder that a new run may not use.

    With `force`, the folder may contain a run, or files with names that no run uses.
    """
    if run_folder.is_run(folder):
        if force:
            return
        state, remedy = "a finished run", "choose another --out, or replace it with --force"
        if not (folder / names.SUMMARY).is_file():
            state, remedy = (
                "an unfinished run",
                f"continue with: {run_folder.continuing(folder)}, {remedy}",
            )
    else:
        entries = sorted(
            path.name
            for path in (folder.iterdir() if folder.is_dir() else ())
            if not _left_by_setup(path) and (not force or path.name in names.OWN)
        )
        if not entries:
            return
        state = ", ".join(entries[:3]) + (", ..." if len(entries) > 3 else "")
        beside = "" if force else ", or write the run beside them with --force"
        remedy = f"choose another --out{beside}"
    raise RunDirError(f"{folder}: expected a new or empty folder, found {state}; {remedy}")


def _left_by_setup(path: Path) -> bool:
    """Return whether a path may be the remains of a run that was killed during its set-up."""
    return (
        path.name == names.LOCK
        or files.is_temporary(path)
        or (path.name == names.ROUNDS and plain.is_plain(path) and path.stat().st_size == 0)
    )


def refuse_lost_lines(folder: Path, rounds: Sequence[RoundRecord]) -> None:
    """Refuse a run whose rounds.jsonl has lost lines, because a resume would drop those rounds.

    A stopped run may leave checkpoints of one round more than there are lines, or of two more on a
    slow disk. These are accepted, and a resume plays their rounds again.
    """
    saved = {number for number, _ in run_folder.round_entries(folder / names.CHECKPOINTS)}
    finished = len(rounds)
    intact = not finished or finished - 1 in saved or rounds[-1].unsaved
    if (latest := max(saved, default=-1)) < finished or (latest <= finished + 1 and intact):
        return
    remedy = f", or, to play them again, remove round {finished + 1} and later from checkpoints/"
    raise CheckpointError(
        f"{folder / names.ROUNDS}: expected the line of round {latest + 1}, whose checkpoints are "
        f"there, got {finished} whole lines; put it back as it was, from a copy{remedy * intact}"
    )


def clear_run(folder: Path) -> None:
    """Remove the files of a run and no others; after a kill, a new run may still use the folder."""
    for path in list(_parts(folder)):
        files.remove(path)
    for name in names.COMPARED:
        if run_folder.is_run(arm := folder / names.COMPARE / name):
            clear_run(arm)
    for name in (*names.OF_ROUNDS, names.STEERING, names.REPLAY):
        with suppress(OSError):  # it has files of others, or is missing
            (folder / name).rmdir()
    files.atomic_write(folder / names.ROUNDS, "")
    files.remove(folder / names.CONFIG)
    files.remove(folder / names.ROUNDS)


def _parts(folder: Path) -> Iterator[Path]:
    """Yield the paths of a run; leave out its two marker files and the folders of compared runs."""
    yield from (folder / name for name in names.PARTS)
    yield from (path for path in folder.iterdir() if names.EARLIER.fullmatch(path.name))
    for name in names.OF_ROUNDS:
        yield from (path for _, path in run_folder.round_entries(folder / name))
    for path in folder.glob(f"{names.STEERING}/*"):
        if names.REQUEST.fullmatch(path.name) or files.is_temporary(path):
            yield path


def kept_checkpoints(rounds: Sequence[RoundRecord], policy: Retention) -> set[str]:
    """Return the recorded paths of the checkpoints that a policy keeps."""
    number = len(rounds) if policy == "all" else policy if isinstance(policy, int) else 1
    paths = {a.checkpoint for record in rounds[-number:] for a in record.agents}
    paths |= {agent.checkpoint for agent in front(rounds)}
    if policy == "best":
        paths |= {best.checkpoint for record in rounds if (best := best_agent(record)) is not None}
    return {path for path in paths if path is not None}


def kept_throughout(
    rounds: Sequence[RoundRecord], policies: Sequence[tuple[int, Retention]]
) -> set[str]:
    """Return the paths of the checkpoints that remain after several policies, one after another.

    Each policy is paired with the number of finished rounds when it was last applied.
    """
    paths = kept_checkpoints(rounds, "all")
    for until, policy in policies:
        played = rounds[:until]
        paths -= kept_checkpoints(played, "all") - kept_checkpoints(played, policy)
    return paths
