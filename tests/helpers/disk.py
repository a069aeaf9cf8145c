"""The calls by which a run touches its folder, as Python makes them: noted, slowed down or refused.

What C or Rust does by itself is not seen: SQLite's own files, and reading of safetensors.
"""

import builtins
import io
import os
import re
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

#: What differs between two files of a kind: unique ids, then numbers.
_UNIQUE = (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22,}"), re.compile(r"\d+"))


#: Calls on names -> their op.
_NAMED = {"rename": "rename", "replace": "rename", "unlink": "unlink", "remove": "unlink"}
_NAMED |= {"mkdir": "mkdir", "rmdir": "rmdir"}


@dataclass(frozen=True)
class Call:
    """A call that changed the disk, or synced a part of it.

    `op` is "open", "create", "write", "truncate", "fsync", "rename", "unlink", "mkdir", "rmdir" or
    "symlink". `at` is the offset of a write or the length of a truncate; `to` is where something
    was renamed to, or what a link points to.
    """

    op: str
    path: Path
    at: int = 0
    data: bytes = b""
    to: Path | None = None


def kind(path, top):
    """The kind of a file: its path below a folder without what tells two of a kind apart."""
    name = path.relative_to(top).as_posix()
    for pattern in _UNIQUE:
        name = pattern.sub("#", name)
    return name


class Disk:
    """Watches every call on paths below a folder; use it as a context manager.

    Attributes:
        calls: Those that succeeded, in order.
    """

    def __init__(self, top, *, fault=None, fsync_seconds=0.0):
        """Keep what to do.

        Args:
            top: The folder; calls on anything else pass unseen.
            fault: Called with (op, path) before each call; returns None or the OSError to raise.
            fsync_seconds: How long each fsync takes.
        """
        self.top = Path(top).absolute()
        self.calls = []
        self._fault = fault
        self._fsync_seconds = fsync_seconds
        self._lock = threading.RLock()
        self._real = {}

    def __enter__(self):
        own = ("open", "write", "pwrite", "fsync", "truncate", "ftruncate", "sendfile", "symlink")
        for name in (*own, *_NAMED):
            self._real[os, name] = getattr(os, name)
            own_call = partial(self._named, name) if name in _NAMED else getattr(self, f"_{name}")
            setattr(os, name, own_call)
        for module in (io, builtins):
            self._real[module, "open"] = module.open
            module.open = self._open_file
        return self

    def __exit__(self, *error):
        for (module, name), real in self._real.items():
            setattr(module, name, real)

    def _of(self, path, dir_fd=None):
        """The absolute path of an argument, or None where it lies elsewhere."""
        if isinstance(path, int):
            try:
                found = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return None
        else:
            found = os.fsdecode(os.fspath(path))
            if dir_fd is not None:
                found = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), found)
        found = Path(os.path.abspath(found))
        return found if found.is_relative_to(self.top) else None

    def _refuse(self, op, path):
        error = None if self._fault is None else self._fault(op, path)
        if error is not None:
            raise error

    def _call(self, real, op, path, arguments, given, **details):
        """Do something that either happens or not, and note it."""
        if path is None:
            return real(*arguments, **given)
        with self._lock:
            self._refuse(op, path)
            found = real(*arguments, **given)
            self.calls.append(Call(op, path, **details))
            return found

    def _written(self, path, descriptor, data, write, at=None):
        """Write some bytes; where that is refused, half of them are written, as on a full disk."""
        with self._lock:
            try:
                self._refuse("write", path)
            except OSError:
                half = bytes(data)[: len(data) // 2]
                if half:
                    self._note_write(path, descriptor, half, write(half), at)
                raise
            number = write(data)
            self._note_write(path, descriptor, bytes(data), number, at)
            return number

    def _note_write(self, path, descriptor, data, number, at):
        place = os.lseek(descriptor, 0, os.SEEK_CUR) - number if at is None else at
        self.calls.append(Call("write", path, place, data[:number]))

    # The calls themselves, with the names that they have in `os`.

    def _open(self, path, flags, mode=0o777, *, dir_fd=None):
        place = self._of(path, dir_fd)
        real = partial(self._real[os, "open"], path, flags, mode, dir_fd=dir_fd)
        return real() if place is None else self._opening(place, flags & os.O_TRUNC, real)

    def _open_file(self, file, mode="r", *arguments, **given):
        place = self._of(file)
        real = partial(self._real[io, "open"], file, mode, *arguments, **given)
        if place is None:
            return real()
        opened = real() if isinstance(file, int) else self._opening(place, "w" in mode, real)
        return _File(opened, self) if set(mode) & set("wax+") else opened

    def _opening(self, place, truncates, real):
        with self._lock:
            self._refuse("open", place)
            before = os.path.lexists(place)
            size = place.stat().st_size if before and truncates else 0
            opened = real()
            self.calls.append(Call("open", place))
            if not before:
                self.calls.append(Call("create", place))
            elif size:
                self.calls.append(Call("truncate", place))
            return opened

    def _write(self, descriptor, data):
        real = self._real[os, "write"]
        return self._pwrite(descriptor, data, None, lambda part: real(descriptor, part))

    def _pwrite(self, descriptor, data, at, write=None):
        real, place = self._real[os, "pwrite"], self._of(descriptor)
        write = write or (lambda part: real(descriptor, part, at))
        return write(data) if place is None else self._written(place, descriptor, data, write, at)

    def _sendfile(self, to, source, *arguments, **given):
        real, place = self._real[os, "sendfile"], self._of(to)
        if place is None:
            return real(to, source, *arguments, **given)
        with self._lock:
            self._refuse("write", place)
            at, start = os.lseek(to, 0, os.SEEK_CUR), arguments[0]
            number = real(to, source, *arguments, **given)
            if number:
                self.calls.append(Call("write", place, at, os.pread(source, number, start)))
            return number

    def _fsync(self, descriptor):
        place = self._of(descriptor)
        if place is not None and self._fsync_seconds:
            time.sleep(self._fsync_seconds)
        self._call(self._real[os, "fsync"], "fsync", place, (descriptor,), {})

    def _named(self, name, path, *to, **given):
        """A call on the name of a file or folder; `to` is another name, or a mode."""
        place = self._of(path, given.get("dir_fd"))
        target = self._of(to[0]) if _NAMED[name] == "rename" else None
        self._call(self._real[os, name], _NAMED[name], place, (path, *to), given, to=target)

    def _symlink(self, source, target, **given):
        real, place = self._real[os, "symlink"], self._of(target)
        self._call(real, "symlink", place, (source, target), given, to=Path(source))

    def _truncate(self, path, length):
        place = self._of(path)
        self._call(self._real[os, "truncate"], "truncate", place, (path, length), {}, at=length)

    def _ftruncate(self, descriptor, length):
        real, place = self._real[os, "ftruncate"], self._of(descriptor)
        self._call(real, "truncate", place, (descriptor, length), {}, at=length)


class _File:
    """A file that is written to, each write of which is a call."""

    def __init__(self, file, disk):
        self._file, self._disk = file, disk

    def write(self, data):
        """Write all of it at once."""
        descriptor = self._file.fileno()
        place = self._disk._of(descriptor)
        if isinstance(data, str):
            encoded = data.encode(self._file.encoding, errors=self._file.errors)
            self._disk._written(place, descriptor, encoded, self._write_encoded)
            return len(data)
        return self._disk._written(place, descriptor, data, self._write_bytes)

    def _write_bytes(self, data):
        number = self._file.write(data)
        self._file.flush()
        return number

    def _write_encoded(self, data):
        self._file.buffer.write(data)
        self._file.buffer.flush()
        return len(data)

    def writelines(self, lines):
        """Write all of them at once, as a buffered file does."""
        lines = list(lines)
        self.write(("" if isinstance(lines[0], str) else b"").join(lines))

    def truncate(self, length=None):
        """Cut it off."""
        length = self._file.tell() if length is None else length
        place = self._disk._of(self._file.fileno())
        real = self._file.truncate
        return self._disk._call(real, "truncate", place, (length,), {}, at=length)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def __iter__(self):
        return iter(self._file)

    def __getattr__(self, name):
        return getattr(self._file, name)
