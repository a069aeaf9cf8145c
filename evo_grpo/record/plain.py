"""Run folders are shared: nothing in one is opened through a link, and only regular files are.

A link planted in a folder would have a resume truncate, append to or delete what it points to, and
an export publish it. What lies above the run folder is the user's own business.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import AfterValidator

from evo_grpo.errors import RunDirError
from evo_grpo.record.names import CHECKPOINTS

#: Without O_NONBLOCK, opening a pipe would wait for its other end for ever.
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

MOST_BYTES = 1 << 26
"""Longest file that holds one JSON document: 64 MiB, hundreds of times what a run writes."""
MOST_BYTES_OF_WEIGHTS = 1 << 34
"""Longest file of an adapter or of an embedded base: 16 GiB."""
MOST_BYTES_OF_LINES = 1 << 30
"""Longest file that grows with the rounds of a run: 1 GiB."""


def open_plain(path: Path, flags: int) -> int:
    """Open a regular file, never through a link, and return its descriptor.

    To be written to, a file may have no second name: what changes in place would change under the
    other name too.

    Raises:
        RunDirError: It is a link, no regular file, or is to be written to and has other names.
        OSError: As `os.open` raises it.
    """
    try:
        descriptor = os.open(path, flags | _SAFELY, 0o644)
    except OSError as error:
        # ELOOP for a link, ENXIO for a socket or a pipe that nobody reads, EISDIR for a folder.
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _refused(path) from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _refused(path)
        if found.st_nlink > 1 and flags & (os.O_WRONLY | os.O_RDWR):
            raise RunDirError(
                f"{path}: expected a file of this folder alone, got one with {found.st_nlink} "
                "names (hard links), which would all change with it; copy it and put the copy in "
                "its place"
            )
    except BaseException:  # Ctrl-C too: the descriptor must not leak
        os.close(descriptor)
        raise
    return descriptor


def read_plain(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the contents of a regular file, never through a link.

    A file longer than `most` is refused: a sparse one of gigabytes costs its sender nothing.

    Raises:
        RunDirError: It is a link or no regular file, or longer than `most`.
        OSError: As `open` raises it, FileNotFoundError where there is none.
    """
    with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
        refuse_oversized(path, most)
        # As long as it is now, also where it grows: `read` would allocate the limit at once.
        return file.read(os.fstat(file.fileno()).st_size)


def refuse_oversized(path: Path, most: int = MOST_BYTES_OF_LINES) -> None:
    """Refuse a file that is longer than what a run writes, for other libraries read it whole."""
    with suppress(FileNotFoundError, NotADirectoryError):
        size = path.lstat().st_size
        if size > most:
            raise RunDirError(
                f"{path}: expected a file of at most {most:,} bytes, got {size:,}; put the file "
                "back as it was written"
            )


def stamp_of(path: Path) -> tuple[int, ...] | None:
    """Return what changes when a file is written or an entry of a folder is; None of nothing."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def is_plain(path: Path) -> bool:
    """Return whether there is a regular file at a path, itself and not by way of a link."""
    return stat.S_ISREG(_mode(path))


def is_folder(path: Path) -> bool:
    """Return whether there is a folder at a path, itself and not by way of a link."""
    return stat.S_ISDIR(_mode(path))


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def refuse_links(path: Path, most: int | None = None, *, deep: bool = True) -> None:
    """Refuse a file or a folder with anything in it that is neither file nor folder; none is fine.

    No file of JSON in it may be longer than `most`; None does not look. With `deep` the folders in
    it are looked into too.
    """
    pending = [path]
    while pending:  # a loop, since a folder may be deeper than Python recurses
        place = pending.pop()
        try:
            found = place.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if stat.S_ISDIR(found.st_mode):
            if deep or place == path:
                pending += sorted(place.iterdir(), reverse=True)
        elif not stat.S_ISREG(found.st_mode):
            raise _refused(place)
        elif most is not None and place.suffix == ".json":
            refuse_oversized(place, most)


def check_relative(path: str) -> str:
    """Return a path as records hold it, or raise ValueError where it leads out of the folder."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path or "\\" in path:
        raise ValueError(f"expected a path below the folder, got {path!r}")
    return path


def _check_checkpoint(path: str) -> str:
    """Refuse a path that is not below checkpoints/: a spreadsheet could take it for a formula."""
    if not check_relative(path).startswith(f"{CHECKPOINTS}/"):
        raise ValueError(f"expected a path below {CHECKPOINTS}/, got {path!r}")
    return path


RelativePath = Annotated[str, AfterValidator(check_relative)]
"""A path below the run folder."""
CheckpointPath = Annotated[str, AfterValidator(_check_checkpoint)]
"""A path below checkpoints/; tables show it as it is."""


def inside(folder: Path, recorded: str) -> Path:
    """Return a recorded path, or raise RunDirError where one of its parts is a link."""
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
    mode = _mode(path)
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    if stat.S_ISLNK(mode):
        kind = f"a link to {os.readlink(path)!r}"
    return RunDirError(
        f"{path}: expected a regular file or folder of its own, got {kind}, which is neither "
        "read nor written to, for it may lead out of the folder; remove it, or put the file itself "
        "there"
    )
