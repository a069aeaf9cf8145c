"""Opens files of run folders, and compares files with their recorded digests.

A run folder may come from a stranger. Only regular files of limited size are opened: through a
link, a resume would change a file outside of the folder, and an export would publish such a file.
Links above the run folder are followed.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Annotated, BinaryIO

from pydantic import AfterValidator

from evo_grpo.errors import CheckpointError, RunDirError
from evo_grpo.record.names import CHECKPOINTS

#: Without O_NONBLOCK, opening a pipe waits for its other end.
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

MAX_JSON_BYTES = 1 << 26
"""Greatest size of a JSON document: 64 MiB. Documents of a run are hundreds of times smaller."""
MAX_WEIGHT_BYTES = 1 << 34
"""Greatest size of a file of an adapter, or of a base that is saved with it: 16 GiB."""
MAX_LOG_BYTES = 1 << 30
"""Greatest size of a file that grows with the rounds of a run: 1 GiB."""


def open_plain(path: Path, flags: int) -> int:
    """Open a regular file, never through a link, and return its descriptor.

    Raises:
        RunDirError: The path is a link or no regular file, or `flags` are for writing and the file
            has other hard links, whose content would change too.
        OSError: As `os.open` raises it.
    """
    try:
        descriptor = os.open(path, flags | _SAFELY, 0o666)
    except OSError as error:
        # ELOOP for a link, ENXIO for a socket or a pipe without a reader, EISDIR for a folder.
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _refused(path) from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _refused(path)
        if status.st_nlink > 1 and flags & (os.O_WRONLY | os.O_RDWR):
            raise RunDirError(
                f"{path}: expected a file of this folder alone, got one with {status.st_nlink} "
                "names (hard links), which would all change with it; copy it and put the copy in "
                "its place"
            )
    except BaseException:  # KeyboardInterrupt too: do not leak the descriptor
        os.close(descriptor)
        raise
    return descriptor


def read_plain(path: Path, most: int = MAX_JSON_BYTES) -> bytes:
    """Return the contents of a regular file of at most `most` bytes, never through a link.

    Raises RunDirError if the path is no such file, and the OSErrors of `open`.
    """
    with opened_plain(path, most) as file:
        # Use the present size, even if the file grows: `read(most)` would allocate `most` bytes.
        return file.read(os.fstat(file.fileno()).st_size)


@contextmanager
def opened_plain(path: Path, most: int) -> Generator[BinaryIO]:
    """Open a regular file for reading, as `read_plain` does."""
    with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
        refuse_oversized(path, most)
        yield file


def refuse_oversized(path: Path, most: int = MAX_LOG_BYTES) -> None:
    """Raise RunDirError for a file of more than `most` bytes; a missing file is accepted."""
    with suppress(FileNotFoundError, NotADirectoryError):
        size = path.lstat().st_size
        if size > most:
            raise RunDirError(
                f"{path}: expected a file of at most {most:,} bytes, got {size:,}; put the file "
                "back as it was written"
            )


def stamp_of(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes with each write to a file or folder; None if it is missing."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def is_plain(path: Path) -> bool:
    """Return whether a path is a regular file, and not a link to one."""
    return os.path.isfile(path) and not os.path.islink(path)


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder, and not a link to one."""
    return os.path.isdir(path) and not os.path.islink(path)


def refuse_links(path: Path, most: int | None = None, *, deep: bool = True) -> None:
    """Raise RunDirError for a link, pipe, socket or device at a path or in the folder at that path.

    `most` is the largest size of a .json file in bytes; `deep` searches subfolders too.
    """
    pending = [path]
    while pending:  # not recursive: a folder may be deeper than Python's recursion limit
        place = pending.pop()
        try:
            mode = place.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        if stat.S_ISDIR(mode):
            if deep or place == path:
                pending += sorted(place.iterdir(), reverse=True)
        elif not stat.S_ISREG(mode):
            raise _refused(place)
        elif most is not None and place.suffix == ".json":
            refuse_oversized(place, most)


def check_relative(path: str) -> str:
    """Return a recorded path, or raise ValueError if it leads out of its folder."""
    parts = {*path.split("/")} - {".", ""}
    if not parts or path.startswith("/") or ".." in parts or "\0" in path or "\\" in path:
        raise ValueError(f"expected a path below the folder, got {path!r}")
    return path


def _check_checkpoint(path: str) -> str:
    """Refuse a path outside of checkpoints/, which a spreadsheet could run as a formula."""
    if not check_relative(path).startswith(f"{CHECKPOINTS}/"):
        raise ValueError(f"expected a path below {CHECKPOINTS}/, got {path!r}")
    return path


RelativePath = Annotated[str, AfterValidator(check_relative)]
"""A path relative to the run folder, which must not lead out of it."""
CheckpointPath = Annotated[str, AfterValidator(_check_checkpoint)]
"""A path below checkpoints/, relative to the run folder; tables show it without escaping it."""


def inside(folder: Path, recorded: str) -> Path:
    """Return the path of a recorded file; RunDirError if it leaves `folder` or passes a link."""
    try:
        parts = PurePosixPath(check_relative(recorded)).parts
    except ValueError as error:
        raise RunDirError(f"{folder}: {error}; put its records back as they were") from None
    path = folder
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise _refused(path)
    return path


def _refused(path: Path) -> RunDirError:
    """Return the error for a path that is no regular file or folder."""
    is_link = path.is_symlink()
    kind = f"a link to {os.readlink(path)!r}" if is_link else "a pipe, socket, device or folder"
    return RunDirError(
        f"{path}: expected a regular file or folder of its own, got {kind}, which may lead out of "
        "the folder and is neither read nor written; remove it, or replace it by the file itself"
    )


def sha256_of(file: Path) -> str | None:
    """Return the SHA-256 of a file, or None if there is no regular file."""
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def check_digests(
    folder: Path, files: Mapping[str, str], recorded_by: str, or_else: str = ""
) -> None:
    """Raise CheckpointError for the first of `files` (path -> SHA-256) that is missing or changed.

    The message names `recorded_by`, such as "round 1 recorded", and the remedy `or_else`.
    """
    for name, digest in damaged(folder, files):
        raise CheckpointError(
            f"checkpoint {folder / name}: it is not the one that {recorded_by} (expected sha256 "
            f"{files[name]}, got {digest or 'no file'}); put the file back as it was"
            f"{or_else and ', '}{or_else}"
        )


def damaged(folder: Path, files: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """Yield name and SHA-256 (None if missing) of each file whose digest is not that in `files`.

    A file that is larger than any file of an adapter raises RunDirError.
    """
    for name, expected in files.items():
        file = folder / name
        refuse_oversized(file, MAX_WEIGHT_BYTES)
        digest = sha256_of(file) if is_plain(file) else None
        if digest != expected:
            yield name, digest
