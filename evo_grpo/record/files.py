"""Crash-safe file operations: atomic writes, appended lines with checksums, folder locks.

Only synced data survives a power cut. To sync a file saves its contents; to sync a folder saves the
names in it. Therefore a round first writes its files, then syncs them and their folders up to the
run folder (`sync_into`), then writes the line that names the files. Only then are old files
removed. `create_folder` syncs the parent of each new folder.
"""

import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import time
import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from pydantic_core import from_json

from evo_grpo.errors import CheckpointError, EvoGrpoError, RunDirError, RunFailedError
from evo_grpo.record.plain import open_plain
from evo_grpo.schema.hparams import Hparams

_log = logging.getLogger(__name__)

_ATTEMPTS, _PAUSE = 5, 0.01
_CHECKSUM = "sha256"
_TEMPORARY = ".tmp"
#: The end of a sealed line, without its line break.
_END = re.compile(rb'"[0-9a-f]{64}"\}\s*\Z')
#: Bytes of that end that the checksum does not cover: the checksum, a quote and a brace.
_UNCOVERED = 66
#: Bytes that hold the first two keys of a sealed line.
_HEAD = 64


@contextmanager
def writing(path: Path, command: str = "resume") -> Generator[None]:
    """Turn an OSError of a write (disk full, no permission) into a RunFailedError.

    The message names the command `evo-grpo <command> RUN`, to call once the cause is removed. Also
    raises the errors of `FolderLock.check`.
    """
    for lock in list(_held):
        lock.check(path)
    try:
        yield
    except OSError as error:
        if isinstance(error, EvoGrpoError):
            raise
        raise RunFailedError(
            f"{path}: cannot be written ({error.strerror or error}); make room or give permission, "
            f"then continue with: evo-grpo {command} RUN"
        ) from error


@contextmanager
def reading(path: Path, command: str = "resume RUN") -> Generator[None]:
    """Turn an OSError of a read into a RunFailedError, which names `command` unless that is ""."""
    try:
        yield
    except OSError as error:
        if isinstance(error, EvoGrpoError):
            raise
        after = f", then continue with: evo-grpo {command}" if command else ""
        raise RunFailedError(
            f"{error.filename or path}: cannot be read ({error.strerror or error}); mend the disk "
            f"or give permission{after}"
        ) from error


def atomic_write(path: Path, text: str | bytes, command: str = "resume") -> str:
    """Write a file atomically and return its SHA-256; a crash leaves the old or the new file.

    A missing folder is created, but not its parents. `command` is as for `writing`.
    """
    # A completion may hold a lone surrogate, which UTF-8 cannot encode.
    data = text if isinstance(text, bytes) else text.encode("utf-8", errors="replace")
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    with writing(path, command):
        create_one(path.parent)
        temporary.unlink(missing_ok=True)
        descriptor = open_plain(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    return hashlib.sha256(data).hexdigest()


def append(path: Path, text: str, *, durable: bool = True) -> None:
    """Append lines to a file, all of them or none, after removing a truncated last line.

    A missing file and its folder are created. With `durable`, return after the lines are on disk.
    """
    with writing(path):
        create_one(path.parent)
        is_new = not os.path.lexists(path)
        descriptor = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            _end_last_line(descriptor, path)
            length = os.fstat(descriptor).st_size
            unwritten = memoryview(text.encode("utf-8", errors="replace"))
            try:
                while unwritten:
                    unwritten = unwritten[os.write(descriptor, unwritten) :]
                if durable:
                    os.fsync(descriptor)
            except BaseException:  # including Ctrl-C: no part of a line may stay in the file
                os.ftruncate(descriptor, length)
                raise
        finally:
            os.close(descriptor)
        if is_new and durable:
            sync(path.parent)


def _end_last_line(descriptor: int, path: Path) -> None:
    """Remove the last line of a file if it is truncated; add its line end if that is missing."""
    length = os.fstat(descriptor).st_size
    if not length or os.pread(descriptor, 1, length - 1) == b"\n":
        return
    line = os.pread(descriptor, length, 0).rpartition(b"\n")[2]
    if is_truncated(line):
        _log.warning("%s: removed a truncated last line of %d bytes", path, len(line))
        os.ftruncate(descriptor, length - len(line))
    else:
        os.write(descriptor, b"\n")


def remove(path: Path) -> None:
    """Remove a file, a folder with its contents, or a link, but not the target of the link."""
    with writing(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def is_temporary(path: Path) -> bool:
    """Return whether a file is the leftover of an interrupted `atomic_write`."""
    return path.name.startswith(".") and path.name.endswith(_TEMPORARY)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_names(folder: Path) -> None:
    """Wait until the names in a folder are on disk; skip a folder that this process cannot read."""
    with suppress(PermissionError):
        sync(folder)


def create_one(folder: Path) -> None:
    """Create a missing folder on disk, but no parents, because a deleted run must stay deleted."""
    if not folder.exists():
        folder.mkdir(exist_ok=True)
        sync_names(folder.parent)


def create_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and wait until they are on disk."""
    for path in reversed((folder, *folder.parents)):
        create_one(path)


def sync_into(top: Path, folder: Path) -> None:
    """Wait until a folder, its contents and its parents up to `top` are on disk, if it exists."""
    with writing(folder):
        if folder.exists():
            sync_tree(folder)
            for above in folder.parents[: len(folder.relative_to(top).parts)]:
                sync(above)


def sync_tree(folder: Path) -> None:
    """Wait until a folder and all its contents are on disk; a missing folder is ignored."""
    for path in (*folder.rglob("*"), folder):
        if path.exists() and not path.is_symlink():
            sync(path)


def to_line(value: Any, *, ensure_ascii: bool = False, **options: Any) -> str:  # noqa: ANN401 -- any JSON value
    """Return a value as one line of strict JSON; see `plain_value`."""
    return json.dumps(plain_value(value), ensure_ascii=ensure_ascii, allow_nan=False, **options)


def to_lines(rows: Iterable[Any]) -> str:
    """Return values as lines of strict JSON, one each; see `to_line`."""
    return "".join(f"{to_line(row)}\n" for row in rows)


@contextmanager
def expecting(
    where: Path | str, what: str, remedy: str = "put the file back as it was"
) -> Generator[None]:
    """Turn a ValueError about the content of a file into a CheckpointError that names the file."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{where}: expected {what}, but {error}; {remedy}") from error


def load_json(data: bytes) -> Any:  # noqa: ANN401 -- any JSON value
    """Parse JSON, or raise ValueError."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from error


def seal(data: Mapping[str, Any], indent: int | None = None) -> str:
    """Return a mapping as JSON, by default in one line; its last value is the rest's checksum."""
    before = to_line({**data, _CHECKSUM: ""}, indent=indent).rpartition('"')[0]
    digest = hashlib.sha256(before.encode("utf-8", errors="replace")).hexdigest()
    return f'{before}{digest}"}}\n'


def unseal_result(data: bytes) -> dict[str, Any]:
    """Return the mapping in a file that `seal` or an early version wrote, or raise ValueError."""
    result = load_json(data)
    if not isinstance(result, dict):
        raise ValueError(f"expected a mapping, got {result!r:.60}")
    return unseal(data) if _CHECKSUM in result else result


def unseal(line: bytes) -> dict[str, Any]:
    """Return the mapping in a line that `seal` wrote, or raise ValueError."""
    data = load_json(line)
    problem = ""
    if not isinstance(data, dict) or _CHECKSUM not in data:
        problem = f"it has no {_CHECKSUM}"
    elif not _is_as_written(line):
        problem = f"its {_CHECKSUM} does not match its contents"
    if problem:
        raise ValueError(problem)
    del data[_CHECKSUM]
    return data


def unsealed_head(line: bytes) -> Mapping[str, Any]:
    """Check a line that `seal` wrote; return at least its first entries, or raise ValueError."""
    if _is_as_written(line):
        return from_json(line[:_HEAD], allow_partial=True)
    return unseal(line)


def _is_as_written(line: bytes) -> bool:
    """Return whether the checksum of a line matches the bytes before it."""
    line = line.rstrip()
    digest = hashlib.sha256(memoryview(line)[:-_UNCOVERED]).hexdigest()
    return line.endswith(f'"{_CHECKSUM}": "{digest}"}}'.encode())


def is_truncated(line: bytes) -> bool:
    """Return whether the last line of a file is a sealed line that a kill truncated.

    Complete JSON, or a line that ends as `seal` ends lines, was not truncated but damaged later.
    """
    if line.endswith(b"\n") or _END.search(line):
        return False
    try:
        load_json(line)
    except ValueError:
        return True
    return False


def plain_value(value: Any) -> Any:  # noqa: ANN401 -- any JSON value
    """Convert a value to values that JSON has; numbers that are not finite become None."""
    if isinstance(value, Hparams):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    # Columns of a dataset may hold dates, which are written as strings, or arrays.
    return plain_value(value.tolist()) if hasattr(value, "tolist") else str(value)


@final
class FolderLock:
    """An flock on a file, held until `release` or the end of the process.

    The file is never removed, because another process may be opening it. Raises RunDirError if
    another process, or another object of this process, holds the lock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()  # user code may change the working folder
        self._owner = os.getpid()
        self._descriptor: int | None = open_plain(path, os.O_RDWR | os.O_CREAT)
        try:
            with writing(path):
                self._take(self._descriptor)
                os.ftruncate(self._descriptor, 0)
            self.write_round()
        except BaseException:  # KeyboardInterrupt too: do not leave the folder locked
            self._drop()
            raise
        _held.add(self)

    def _take(self, descriptor: int) -> None:
        for _ in range(_ATTEMPTS):  # `is_trained` holds it for an instant to test it
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(_PAUSE)
        holder, *_ = os.pread(descriptor, 32, 0).decode(errors="replace").split() or ["(unknown)"]
        raise RunDirError(
            f"{self._path.parent}: in use by process {holder}; wait until it exits, stop it, or "
            "choose another folder with --out"
        )

    def write_round(self, *numbers: int) -> None:
        """Write the id of this process and `numbers` into the lock file, a line each.

        `numbers` has the round (0-based) that is being played, if any: a process that writes a
        request reads it, and the request is carried out after that round. The text never gets
        shorter, because later rounds have at least as many digits.
        """
        if self._descriptor is not None:
            lines = "".join(f"{number}\n" for number in (os.getpid(), *numbers))
            with writing(self._path):
                os.pwrite(self._descriptor, lines.encode(), 0)

    def check(self, path: Path) -> None:
        """Raise RunDirError if a fork of the process that locked the folder writes to a path in it.

        Raise RunFailedError if the folder was deleted, moved or replaced.
        """
        folder = self._path.parent
        if not path.absolute().is_relative_to(folder):
            return
        if os.getpid() != self._owner:
            raise RunDirError(
                f"{path}: expected process {self._owner} to write it, which locked the folder, got "
                f"{os.getpid()}, a fork of it; end a forked process with os._exit, or start it "
                "with the method spawn"
            )
        assert self._descriptor is not None, "a lock that is checked is held"
        with suppress(OSError):
            if os.path.samestat(self._path.lstat(), os.fstat(self._descriptor)):
                return
        raise RunFailedError(
            f"{path}: cannot be written: {folder} was deleted, moved or replaced while this "
            "process wrote to it; put it back and resume it, or start the run anew"
        )

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._drop()
            _held.discard(self)

    def _drop(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _forget_locks() -> None:
    # A forked worker shares the descriptor and would keep the lock after the end of the run.
    for lock in list(_held):
        lock._drop()  # pyright: ignore[reportPrivateUsage] -- the same module


os.register_at_fork(after_in_child=_forget_locks)
