"""Run folders are shared: nothing in one is opened through a link, and only regular files are.

A link planted in a folder would have a resume truncate, append to or delete what it points to, and
an export publish it. What lies above the run folder is the user's own business.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path, PurePosixPath

from evo_grpo.errors import RunDirError

#: Without O_NONBLOCK, opening a pipe would wait for its other end for ever.
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_plain(path: Path, flags: int, mode: int = 0o644) -> int:
    """Open a regular file, never through a link, and return its descriptor.

    Args:
        path: The file.
        flags: As `os.open` takes them. To be written to, a file may have no second name: what
            changes in place would change under the other name too.
        mode: Permissions of a file that is created.

    Raises:
        RunDirError: It is a link, no regular file, or is to be written to and has other names.
        OSError: As `os.open` raises it.
    """
    try:
        descriptor = os.open(path, flags | _SAFELY, mode)
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


def read_plain(path: Path) -> bytes:
    """Return the contents of a regular file, never through a link.

    Raises:
        RunDirError: It is a link or no regular file.
        OSError: As `open` raises it, FileNotFoundError where there is none.
    """
    with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
        return file.read()


def is_plain(path: Path) -> bool:
    """Return whether there is a regular file at a path, itself and not by way of a link."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Return whether there is a folder at a path, itself and not by way of a link."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def refuse_links_in(folder: Path) -> None:
    """Refuse a folder that is a link, or has one directly in it; what lies deeper is not looked at.

    Raises:
        RunDirError: It names the first such thing.
    """
    if not os.path.lexists(folder):
        return
    _refuse_link(folder)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        _refuse_link(path)


def refuse_links(path: Path) -> None:
    """Refuse a file or a folder with anything in it that is neither file nor folder.

    Raises:
        RunDirError: It names the first such thing.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISREG(found.st_mode):
        return
    if not stat.S_ISDIR(found.st_mode):
        raise _refused(path)
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                refuse_links(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                raise _refused(Path(entry.path))


def check_relative(path: str) -> str:
    """Return a path as records hold it: below the run folder, whatever that is.

    Raises:
        ValueError: It is absolute, empty, or climbs out of the folder.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path or "\\" in path:
        raise ValueError(f"expected a path below the folder, got {path!r}")
    return path


def inside(folder: Path, recorded: str) -> Path:
    """Return a recorded path, none of whose parts below the folder is a link.

    Args:
        folder: The run folder.
        recorded: The path as `check_relative` takes it.

    Raises:
        RunDirError: It leaves the folder.
    """
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


def _refuse_link(path: Path) -> None:
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise _refused(path)


def _refused(path: Path) -> RunDirError:
    kind = "something else"
    try:
        mode = path.lstat().st_mode
    except OSError:
        mode = 0
    if stat.S_ISLNK(mode):
        kind = f"a link to {os.readlink(path)!r}"
    elif stat.S_ISDIR(mode):
        kind = "a folder"
    elif stat.S_ISFIFO(mode):
        kind = "a pipe"
    elif stat.S_ISSOCK(mode):
        kind = "a socket"
    elif stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        kind = "a device"
    return RunDirError(
        f"{path}: expected a regular file or folder of the run, got {kind}, which is neither read "
        "nor written to, for it may lead out of the folder; remove it, or put the file itself there"
    )
