"""Files of lines that grow while a run goes on: the metrics of a round, and the notes."""

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
    """Append bytes to a file that is open without a buffer, at its end: all of them or none.

    With `durable` it waits until they are on disk.
    """
    length, rest = file.tell(), memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
        if durable:
            os.fsync(file.fileno())
    except BaseException:  # Ctrl-C too: no part of a line may stay in the file
        os.ftruncate(file.fileno(), length)
        raise


def append_note(path: Path, text: str) -> None:
    """Append a note with the time to a file of notes, and wait until it is on disk.

    A last line without its end, left by a process that was killed, is removed.
    """
    with writing(path):
        is_new = not os.path.lexists(path)
        descriptor = open_plain(path, os.O_RDWR | os.O_CREAT)
        # Unbuffered: after a failed write nothing may be left to be written when it is closed.
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
    """The file to which a round's steps are appended by one process.

    The first step creates it with its folder, in place of one that is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begun = False
        self._length = 0
        self._digest = hashlib.sha256()

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the rows of a step with one write, so that readers see them together."""
        data = _lines(rows)
        with writing(self.path), self._opened() as file:
            append(file, data, durable=False)
        self._length += len(data)
        self._digest.update(data)

    def finish(self) -> str:
        """Wait until the file is on disk, and return its SHA-256."""
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
                f"{self.path}: expected {self._length} bytes as this process left them, got "
                f"{found}; something else writes to the file: stop it, then go on with: evo-grpo "
                "resume RUN"
            )
        return file


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(to_line(row) + "\n" for row in rows).encode("utf-8", errors="replace")
