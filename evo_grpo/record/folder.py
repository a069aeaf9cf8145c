"""Recognise, read, create, clear and protect run folders, without the lock of the run."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from evo_grpo.errors import CheckpointError, RunDirError, RunNotFoundError
from evo_grpo.record.files import (
    create_folder,
    is_temporary,
    is_truncated,
    many_objects,
    reading,
    sync_names,
    unseal_result,
    unsealed_head,
    writing,
)
from evo_grpo.record.names import (
    BEST,
    CHECKPOINTS,
    COMPARE,
    COMPARED,
    COMPARISON,
    CONFIG,
    COUNTER,
    EARLIER,
    FILES,
    JUDGED,
    LOCK,
    MEAN,
    OF_READERS,
    OF_ROUNDS,
    RECORDED_IN_PYTHON,
    REPLAY,
    REPLAY_RESULT,
    REPLAYED,
    REQUEST,
    ROUNDS,
    STEERING,
    STUDY_ASIDES,
    SUMMARY,
)
from evo_grpo.record.plain import (
    MAX_LOG_BYTES,
    is_folder,
    is_plain,
    open_plain,
    opened_plain,
    read_plain,
    refuse_links,
)
from evo_grpo.record.records import amendment_from_json, check_format, round_from_json
from evo_grpo.schema.validated import validated
from evo_grpo.settings.plain_yaml import MAX_YAML_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pydantic import TypeAdapter

    from evo_grpo.record.records import Amendment, RoundRecord

T = TypeVar("T")

_FOLDERS = (*OF_ROUNDS, COMPARE, JUDGED, REPLAY, STEERING)
_ROUND = re.compile(r"round-(\d{4,})(\.jsonl)?")


def is_run(path: str | Path) -> bool:
    """Return whether a path is a run folder."""
    folder = Path(path)
    return (folder / CONFIG).is_file() and (folder / ROUNDS).is_file()


def run_containing(path: Path) -> Path | None:
    """Return the run folder that contains a path, before or after following links, or None."""
    folders = [place for one in (path.absolute(), path.resolve()) for place in (one, *one.parents)]
    return next((folder for folder in folders if is_run(folder)), None)


def is_trained(folder: Path) -> bool:
    """Return whether a process holds the lock of a run."""
    try:
        descriptor = open_plain(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def expect_run(path: str | Path) -> Path:
    """Return the path of a run folder, or raise RunNotFoundError, which names missing files."""
    folder = Path(path)
    if is_run(folder):
        return folder
    if not folder.exists():
        found = "there is nothing at that path"
    elif not folder.is_dir():
        found = "it is a file"
    else:
        missing = [name for name in (CONFIG, ROUNDS) if not (folder / name).is_file()]
        found = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
    raise RunNotFoundError(
        f"{folder}: no run folder: expected one with {ROUNDS} and {CONFIG} in it, but {found}; "
        "give the folder that `evo-grpo run` printed"
    )


def read_rounds(path: str | Path) -> list[RoundRecord]:
    """Return the finished rounds of a run, also while the run is in progress.

    Raises:
        RunNotFoundError: The path is no run folder.
        CheckpointError: A line is damaged.
        RunDirError: Another version of this library wrote the run.
        RunFailedError: Reading the disk fails.
    """
    file = expect_run(path) / ROUNDS
    with reading(file, ""):
        return parse_rounds(file).records


def read_result(
    file: Path, schema: TypeAdapter[T], what: str, command: str
) -> tuple[dict[str, Any], T] | None:
    """Return the contents of a result file, as JSON and as the schema's type; None if missing.

    Args:
        file: The file.
        schema: Builds the value from the JSON.
        what: A description of the contents, for messages.
        command: The command of `evo-grpo` that writes the file again, for messages.

    Raises:
        CheckpointError: The file is damaged.
        RunFailedError: Reading the disk fails.
    """
    if not os.path.lexists(file):
        return None
    try:
        with reading(file, command):
            data = unseal_result(read_plain(file))
        return data, validated(schema, data)
    except ValueError as error:
        raise CheckpointError(
            f"{file}: expected {what}, but {error}; delete it, then write it again with: "
            f"evo-grpo {command}"
        ) from error


def config_text(folder: Path) -> str:
    """Return the text of a run's population.yaml."""
    try:
        return read_plain(folder / CONFIG, MAX_YAML_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{folder / CONFIG}: expected the run's settings as they were written, but they are "
            f"not UTF-8 ({error.reason}); put the file back as it was"
        ) from error


def objects_line(folder: Path) -> str:
    """Return the line of a run's population.yaml that lists its Python objects, "" without any."""
    first = config_text(folder).partition("\n")[0]
    return f"{first}\n" if first.startswith(RECORDED_IN_PYTHON) else ""


def recorded_objects(folder: Path) -> dict[str, str]:
    """Return the Python objects that `Population.train` was given, each with its description.

    The keys are keywords such as "env" and "model"; "agents" stands for agents that had trained
    before.
    """
    line = objects_line(folder)
    named = line.removeprefix(RECORDED_IN_PYTHON).strip().split(", ") if line else []
    return {one.partition(" ")[0]: one for one in named}


def continuing(folder: Path) -> str:
    """Return the command that continues a run, or the call in Python if it needs objects."""
    if recorded_objects(folder):
        return f"evo_grpo.Population.resume({str(folder)!r}, env=...) in Python"
    return f"evo-grpo resume {folder}"


def refuse_objects(folder: Path, so: str) -> None:
    """Refuse a run that was recorded from Python with objects that no file can name.

    Args:
        folder: The run folder.
        so: The consequence and the remedy, for the message.
    """
    if objects := recorded_objects(folder):
        raise RunDirError(
            f"{folder}: it was recorded from Python with {', '.join(objects.values())}, which "
            f"no file can name, {so}"
        )


class Parsed(NamedTuple):
    """The contents of rounds.jsonl from a byte on.

    Attributes:
        records: The finished rounds.
        length: Bytes of their lines; the rest is a line that a kill truncated.
        places: The first byte of each round's line in the file.
    """

    records: list[RoundRecord]
    length: int
    places: list[int]


@many_objects()
def parse_rounds(path: Path, *, start: int = 0, first: int = 0) -> Parsed:
    """Read rounds.jsonl from byte `start`, the beginning of the line of round `first`.

    Raises:
        CheckpointError: A line is damaged; the error names it.
        RunDirError: Another version of this library wrote it.
    """
    records: list[RoundRecord] = []
    places: list[int] = []
    length = 0
    with opened_plain(path, MAX_LOG_BYTES) as file:
        file.seek(start)
        for number, line in enumerate(file, start=1):
            try:
                head = unsealed_head(line)
                # Its RunDirError is no ValueError and passes: a whole line of another version.
                check_format(head, f"{path}, line {first + number}")
                if "amends" in head:
                    _amend(records, amendment_from_json(line), first)
                    length += len(line)
                    continue
                record = round_from_json(line)
                if record.round != first + len(records):
                    raise ValueError(
                        f"it is round {record.round + 1}, expected {first + len(records) + 1}"
                    )
            except ValueError as error:
                if is_truncated(line):  # the last one: others have their line end
                    break
                if line.startswith(b'{"round"'):  # evo-grpo 0.2 wrote no format
                    check_format({}, f"{path}, line {first + number}")
                raise CheckpointError(
                    f"{path}, line {first + number}: expected round {first + len(records) + 1} as "
                    f"it was written, but {error}; put the file back as it was, from a copy"
                ) from error
            records.append(record)
            places.append(start + length)
            length += len(line)
    return Parsed(records, length, places)


def refuse_lost_lines(folder: Path, rounds: Sequence[RoundRecord]) -> None:
    """Refuse a run whose rounds.jsonl has lost lines, because a resume would drop those rounds.

    A stopped run leaves files of at most one round after its last line, and files of a round are
    removed only after the line of the next round is written. Where the disk of the first rank is
    slow, other ranks write their checkpoints of one more round: a resume plays both again.
    """
    found = {number for number, _ in round_entries(folder / CHECKPOINTS)}
    finished = len(rounds)
    kept = not finished or finished - 1 in found or rounds[-1].unsaved
    if (last := max(found, default=-1)) < finished or (last <= finished + 1 and kept):
        return
    again = (
        f"; or, to play them again, remove the folders of round {finished + 1} and later from "
        f"{CHECKPOINTS}/"
    )
    raise CheckpointError(
        f"{folder / ROUNDS}: expected the line of round {last + 1}, whose checkpoints are "
        f"there, got {finished} whole lines; it was cut after it had been written: put it back as "
        f"it was, from a copy{again if kept else ''}"
    )


def _amend(records: list[RoundRecord], amendment: Amendment, first: int) -> None:
    """Add the requests made after the last round to its record.

    Without records, the amended round is number `first` - 1, which was read before: nothing is
    done.
    """
    if amendment.amends != first + len(records) - 1:
        raise ValueError(
            f"it amends round {amendment.amends}, expected round {first + len(records) - 1}"
        )
    if records:
        records[-1] = amendment.applied(records[-1])


def round_name(round: int) -> str:
    """Return the prefix of the names of a round's files and folders."""
    return f"round-{round:04d}"


def round_entries(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield round and path of each entry of a folder that is named after a round."""
    for path in sorted(folder.iterdir()) if is_folder(folder) else ():
        if match := _ROUND.fullmatch(path.name):
            yield int(match[1]), path


def remove(path: Path) -> None:
    """Remove a file, a folder with its contents, or a link, but not the target of the link."""
    with writing(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def fresh_folder(name: str, parent: Path) -> Path:
    """Create and return `<parent>/<name>-<n>`, with n one above the greatest number in use."""
    stem = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "run"
    pattern = re.compile(re.escape(stem) + r"-(\d+)")
    make_folder(parent)
    with writing(parent):
        used = [int(m[1]) for p in parent.iterdir() if (m := pattern.fullmatch(p.name))]
        number = max(used, default=0) + 1
        while True:
            try:
                (parent / f"{stem}-{number}").mkdir()
            except FileExistsError:  # another process took the number
                number += 1
            else:
                sync_names(parent)
                return parent / f"{stem}-{number}"


def make_folder(folder: Path) -> None:
    """Create a folder with its parents, or raise RunDirError."""
    try:
        create_folder(folder)
    except OSError as error:
        raise RunDirError(
            f"{folder}: cannot be created ({error.strerror}); make room or give permission, "
            "or choose another --out"
        ) from error


def refuse_links_in_run(folder: Path) -> None:
    """Refuse a run folder in which one of the run's files is a link, pipe, socket or device."""
    for name in (*FILES, *STUDY_ASIDES, LOCK, *_FOLDERS):
        refuse_links(folder / name)
    for name in OF_READERS:  # wandb creates links below its own folder
        refuse_links(folder / name, deep=False)
    for path in folder.iterdir():
        if EARLIER.fullmatch(path.name):
            refuse_links(path)


def refuse_foreign(folder: Path) -> None:
    """Raise RunDirError for a folder that is neither empty nor a run."""
    if not folder.is_dir() or is_run(folder):
        return
    names = sorted(path.name for path in folder.iterdir() if not _left_by_setup(path))
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise RunDirError(
            f"{folder}: expected a new or empty folder, found {shown}; choose another --out, "
            "or write the run beside them with --force"
        )


def refuse_run(folder: Path) -> None:
    """Raise RunDirError for a folder that holds a run."""
    if (folder / SUMMARY).is_file():
        raise RunDirError(
            f"{folder}: expected a new or empty folder, found a finished run; "
            "choose another --out, or replace it with --force"
        )
    raise RunDirError(
        f"{folder}: expected a new or empty folder, found an unfinished run; "
        f"continue with: {continuing(folder)}, choose another --out, or replace it with --force"
    )


def refuse_taken(folder: Path) -> None:
    """Raise RunDirError for a folder that a new run may not use without force."""
    refuse_foreign(folder)
    if is_run(folder):
        refuse_run(folder)


def clear_run(folder: Path) -> None:
    """Remove the files of a run, and nothing else from its folder."""
    # The two files by which `is_run` recognises a run go last, so that a clearing that was
    # interrupted can be repeated.
    remove(folder / COMPARISON)
    for name in COMPARED:
        if is_run(folder / COMPARE / name):
            clear_run(folder / COMPARE / name)
    clear_replay(folder)
    clear_requests(folder)
    for path in list(folder.iterdir()):
        if EARLIER.fullmatch(path.name):
            remove(path)
    for name in (
        *OF_READERS,
        JUDGED,
        BEST,
        MEAN,
        f"{CHECKPOINTS}/.best-new",
        f"{CHECKPOINTS}/.best-old",
    ):
        remove(folder / name)
    for name in OF_ROUNDS:
        for _, path in round_entries(folder / name):
            remove(path)
        if (folder / name).is_dir() and not any((folder / name).iterdir()):
            (folder / name).rmdir()
    for name in reversed((*FILES, *STUDY_ASIDES)):
        remove(folder / name)


def clear_replay(folder: Path) -> None:
    """Remove a replay from a run, and nothing else from its folder; the result goes first."""
    if not (folder / REPLAY).is_dir():
        return
    for name in (REPLAY_RESULT, *(f"{REPLAY}/{training}" for training in REPLAYED)):
        remove(folder / name)
    if not any((folder / REPLAY).iterdir()):
        (folder / REPLAY).rmdir()


def clear_requests(folder: Path) -> None:
    """Remove the requests to a run, and nothing else from its folder."""
    place = folder / STEERING
    if not is_folder(place):
        return
    for path in list(place.iterdir()):
        if REQUEST.fullmatch(path.name) or is_temporary(path) or path == folder / COUNTER:
            remove(path)
    if not any(place.iterdir()):
        place.rmdir()


def move_aside(folder: Path) -> None:
    """Rename existing files that have the name of one of a run's files."""
    for name in (*FILES, *STUDY_ASIDES, *_FOLDERS, *OF_READERS):
        path = folder / name
        # Rename a dangling link too: it would be followed once its target exists.
        if not os.path.lexists(path) or _left_by_setup(path):
            continue
        number = 1
        while os.path.lexists(kept := folder / f"{name}.old-{number}"):
            number += 1
        with writing(path):
            path.rename(kept)


def _left_by_setup(path: Path) -> bool:
    """Return whether a run that was killed during its set-up left this path."""
    return (
        path.name == LOCK
        or is_temporary(path)
        or (path.name == ROUNDS and is_plain(path) and path.stat().st_size == 0)
    )
