"""How a run folder is recognised, read without a lock, created, cleared and protected."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from evo_grpo.errors import CheckpointError, RunDirError, RunNotFoundError
from evo_grpo.record.files import is_temporary, torn, unseal, writing
from evo_grpo.record.names import (
    BEST,
    CHECKPOINTS,
    COMPARE,
    COMPARED,
    COMPARISON,
    CONFIG,
    EARLIER,
    INPUTS,
    JOURNAL,
    LEADERBOARD,
    LOCK,
    MEAN,
    OF_ROUNDS,
    RECORDED_IN_PYTHON,
    REPLAY,
    REPLAY_RESULT,
    REPLAYED,
    REPORT,
    REQUEST,
    ROUNDS,
    STEERING,
    STUDY,
    STUDY_ASIDES,
    SUMMARY,
    TRACKERS,
)
from evo_grpo.record.plain import (
    check_relative,
    is_folder,
    is_plain,
    read_plain,
    refuse_links,
    refuse_links_in,
)
from evo_grpo.record.records import amendment_from_json, check_format, round_from_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from evo_grpo.record.records import Amendment, RoundRecord

_FILES = (CONFIG, ROUNDS, INPUTS, JOURNAL, STUDY, LEADERBOARD, SUMMARY, REPORT)
_FOLDERS = (*OF_ROUNDS, COMPARE, REPLAY, STEERING)
_ROUND = re.compile(r"round-(\d{4,})(\.jsonl)?")


def is_run(path: str | Path) -> bool:
    """Return whether a path is a run folder."""
    folder = Path(path)
    return (folder / CONFIG).is_file() and (folder / ROUNDS).is_file()


def expect_run(path: str | Path) -> Path:
    """Return the path of a run folder.

    Raises:
        RunNotFoundError: When it is none, naming what was expected in it.
    """
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
    """Return the finished rounds of a run without its lock, also while the run goes on.

    Raises:
        RunNotFoundError: When it is no run folder.
        CheckpointError: When a line is damaged.
        RunDirError: When another version of this library wrote it.
    """
    return parse_rounds(expect_run(path) / ROUNDS)[0]


def read_result(file: Path, what: str, command: str) -> dict[str, Any] | None:
    """Return what a file of results holds, or None where there is none yet.

    Args:
        file: The file, JSON.
        what: What it holds, for messages.
        command: The command of `evo-grpo` that writes it again.

    Raises:
        CheckpointError: When the file is damaged.
    """
    if not os.path.lexists(file):
        return None
    again = f"delete it, then write it again with: evo-grpo {command}"
    try:
        data = json.loads(read_plain(file))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: expected {what}, but it is not JSON ({error}); {again}"
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file}: expected {what}, a mapping, got {data!r:.60}; {again}")
    return cast("dict[str, Any]", data)


def read_sealed(file: Path, what: str) -> dict[str, Any] | None:
    """Return what a file of one sealed line holds, None where there is none.

    Args:
        file: The file.
        what: What it records, for messages.

    Raises:
        CheckpointError: It is damaged.
    """
    try:
        return unseal(read_plain(file))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CheckpointError(
            f"{file}: expected the record of {what}, but {error}; put the file back as it was"
        ) from error


def config_text(folder: Path) -> str:
    """Return the resolved configuration of a run as it was written.

    Raises:
        CheckpointError: It is not UTF-8.
    """
    try:
        return read_plain(folder / CONFIG).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{folder / CONFIG}: expected the run's settings as they were written, but they are "
            f"not UTF-8 ({error.reason}); put the file back as it was"
        ) from error


def refuse_objects(folder: Path, so: str) -> None:
    """Refuse a run that `Population.train` recorded with objects that no file can name.

    Args:
        folder: The run folder.
        so: What follows from it, and what to do instead.

    Raises:
        RunDirError: It names the objects.
    """
    first = config_text(folder).partition("\n")[0]
    if first.startswith(RECORDED_IN_PYTHON):
        raise RunDirError(
            f"{folder}: it was recorded by Population.train with "
            f"{first.removeprefix(RECORDED_IN_PYTHON)}, which no file can name, {so}"
        )


def parse_rounds(
    path: Path, *, start: int = 0, first: int = 0, end: int | None = None
) -> tuple[list[RoundRecord], int]:
    """Read rounds.jsonl, or a part of it.

    Args:
        path: The file.
        start: Byte at which a line begins.
        first: Round of that line.
        end: Byte up to which the file is read; None reads all of it.

    Returns:
        The records, and their length in the file in bytes: the rest is a line that was torn when
        its writer was killed.

    Raises:
        CheckpointError: When a line is damaged, naming it.
        RunDirError: When another version of this library wrote it.
    """
    records: list[RoundRecord] = []
    length = 0
    lines = read_plain(path)[start:end].splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            data = unseal(line)
            # Its RunDirError is not a ValueError and passes: the line is whole, of another version.
            check_format(data, f"{path}, line {first + number}")
            if "amends" in data:
                _amend(records, amendment_from_json(data), first)
                length += len(line)
                continue
            record = round_from_json(data)
            if record.round != first + len(records):
                raise ValueError(
                    f"it is round {record.round + 1}, expected {first + len(records) + 1}"
                )
            for file in (*record.files, *(a.checkpoint for a in record.agents)):
                if file is not None:
                    check_relative(file)
        except ValueError as error:
            if number == len(lines) and torn(line):
                break
            raise CheckpointError(
                f"{path}, line {first + number}: expected round {first + len(records) + 1} as it "
                f"was written, but {error}; put the file back as it was, from a copy"
            ) from error
        records.append(record)
        length += len(line)
    return records, length


def _amend(records: list[RoundRecord], amendment: Amendment, first: int) -> None:
    """Put what was asked for after a round into its record.

    Args:
        records: The rounds so far, of which the last one is amended; without any its round was
            read before, and nothing is left to do.
        amendment: What was asked for.
        first: Round of the first record.

    Raises:
        ValueError: It is of another round.
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
    """Yield round and path of the entries of a folder that are named after a round."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if match := _ROUND.fullmatch(path.name):
            yield int(match[1]), path


def remove(path: Path) -> None:
    """Remove a file, a folder with its contents, or a link, but not the target of the link."""
    with writing(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove_released_locks(folder: Path) -> None:
    """Remove what is left of a lock of Optuna's whose process was killed while it released it."""
    for path in folder.glob(f"{JOURNAL}.lock?*.rename"):
        remove(path)


def fresh_folder(name: str, parent: Path) -> Path:
    """Create and return `<parent>/<name>-<n>` with the first number above those in use.

    Args:
        name: Name of the run; characters that do not suit a folder become "-".
        parent: The folder of all runs; created when missing.
    """
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
                return parent / f"{stem}-{number}"


def make_folder(folder: Path) -> None:
    """Create a folder with its parents.

    Raises:
        RunDirError: When the system refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirError(
            f"{folder}: cannot be created ({error.strerror}); give permission, "
            "or choose another --out"
        ) from error


def refuse_planted(folder: Path) -> None:
    """Refuse a run folder where one of the run's own names leads out of it.

    Raises:
        RunDirError: It names the link, pipe or device.
    """
    for name in (*_FILES, *STUDY_ASIDES, LOCK, *_FOLDERS):
        refuse_links(folder / name)
    refuse_links_in(folder / TRACKERS)  # wandb makes links of its own in what it has there
    for path in folder.iterdir():
        if EARLIER.fullmatch(path.name):
            refuse_links(path)


def remove_foreign_lock(folder: Path) -> None:
    """Remove a link in the place of Optuna's lock that is not its own; for who holds the run."""
    # Optuna locks its journal by a link to it, which a killed process leaves behind. Its own is
    # harmless, for it is never followed; but to it any link is a lock that somebody holds.
    lock = folder / f"{JOURNAL}.lock"
    if lock.is_symlink() and lock.readlink() != (folder / JOURNAL).absolute():
        remove(lock)


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
        f"go on with: evo-grpo resume {folder}, choose another --out, or replace it with --force"
    )


def refuse_taken(folder: Path) -> None:
    """Raise RunDirError for a folder that a new run may not use without force."""
    refuse_foreign(folder)
    if is_run(folder):
        refuse_run(folder)


def clear_run(folder: Path) -> None:
    """Remove the files of a run, and nothing else from its folder."""
    # The two that make it a run go last: if interrupted, the folder is still a run to be cleared.
    remove(folder / COMPARISON)
    for name in COMPARED:
        if is_run(folder / COMPARE / name):
            clear_run(folder / COMPARE / name)
    clear_replay(folder)
    clear_requests(folder)
    remove(folder / TRACKERS)
    remove_released_locks(folder)
    for path in list(folder.iterdir()):
        if EARLIER.fullmatch(path.name):
            remove(path)
    for name in (BEST, MEAN, f"{CHECKPOINTS}/.best-new", f"{CHECKPOINTS}/.best-old"):
        remove(folder / name)
    for name in OF_ROUNDS:
        for _, path in round_entries(folder / name):
            remove(path)
        if (folder / name).is_dir() and not any((folder / name).iterdir()):
            (folder / name).rmdir()
    for name in reversed((*_FILES, f"{JOURNAL}.lock", *STUDY_ASIDES)):
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
    """Remove what was asked of a run, and nothing else from its folder."""
    place = folder / STEERING
    if not is_folder(place):
        return
    for path in list(place.iterdir()):
        if REQUEST.fullmatch(path.name) or is_temporary(path):
            remove(path)
    if not any(place.iterdir()):
        place.rmdir()


def move_aside(folder: Path) -> None:
    """Rename files of other origin that have the name of one of a run's files."""
    for name in (*_FILES, *STUDY_ASIDES, *_FOLDERS, TRACKERS):
        path = folder / name
        # Also a link to nothing: it would be followed once there is something.
        if not os.path.lexists(path) or _left_by_setup(path):
            continue
        number = 1
        while os.path.lexists(kept := folder / f"{name}.old-{number}"):
            number += 1
        with writing(path):
            path.rename(kept)


def _left_by_setup(path: Path) -> bool:
    """Return whether a run that was killed while it set up its folder left this path."""
    return (
        path.name == LOCK
        or is_temporary(path)
        or (path.name == ROUNDS and is_plain(path) and path.stat().st_size == 0)
    )
