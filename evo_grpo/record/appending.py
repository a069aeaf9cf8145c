"""Files to which a run appends lines: the metrics of a round, and the notes."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, final

from evo_grpo.errors import RunDirError
from evo_grpo.record.files import create_one, sync, to_line, writing
from evo_grpo.record.plain import open_plain


def append(file: FileIO, data: bytes, *, durable: bool) -> None:
    """Append bytes to the end of an unbuffered file: all of them or none.

    With `durable`, return after they are on disk.
    """
    length, rest = file.tell(), memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
        if durable:
            os.fsync(file.fileno())
    except BaseException:  # including Ctrl-C: no part of a line may stay in the file
        os.ftruncate(file.fileno(), length)
        raise


def append_note(path: Path, text: str) -> None:
    """Append a note with the present time to a file of notes, and sync it to disk.

    An incomplete last line, left by a process that was killed, is removed.
    """
    with writing(path):
        is_new = not os.path.lexists(path)
        descriptor = open_plain(path, os.O_RDWR | os.O_CREAT)
        # Unbuffered, so that closing the file after a failed write does not write the rest.
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            whole = file.seek(0, os.SEEK_END)
            if whole and os.pread(file.fileno(), 1, whole - 1) != b"\n":
                whole = os.pread(file.fileno(), whole, 0).rfind(b"\n") + 1
                file.truncate(whole)
                file.seek(whole)
            append(file, _lines([{"time": time.time(), "text": text}]), durable=True)
        if is_new:
            sync(path.parent)


@final
class MetricsFile:
    """The metrics file of a round, to which one process appends steps.

    The first step creates the file and its folder, and replaces an existing file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begun = False
        self._length = 0
        self._digest = hashlib.sha256()

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the rows of a step in one write, so that readers see all of them at once."""
        data = _lines(rows)
        with writing(self.path), self._opened() as file:
            append(file, data, durable=False)
        self._length += len(data)
        self._digest.update(data)

    def finish(self) -> str:
        """Sync the file to disk and return its SHA-256."""
        with writing(self.path), self._opened() as file:
            os.fsync(file.fileno())
            sync(self.path.parent)
        return self._digest.hexdigest()

    def _opened(self) -> FileIO:
        flags = os.O_WRONLY
        if not self._begun:
            create_one(self.path.parent)
            self.path.unlink(missing_ok=True)
            flags |= os.O_CREAT | os.O_EXCL
        file = os.fdopen(open_plain(self.path, flags), "wb", buffering=0)
        self._begun = True
        if (found := file.seek(0, os.SEEK_END)) != self._length:
            file.close()
            raise RunDirError(
                f"{self.path}: expected the {self._length} bytes that this process wrote, got "
                f"{found}; another program writes to the file: stop it, then continue with: "
                "evo-grpo resume RUN"
            )
        return file


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(to_line(row) + "\n" for row in rows).encode("utf-8", errors="replace")
