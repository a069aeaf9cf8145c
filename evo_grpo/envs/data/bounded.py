"""Files of strangers, read up to a limit: a small file may hold far more than lies on the disk."""

from __future__ import annotations

import io
import stat
from pathlib import Path
from typing import TextIO, final

from evo_grpo.errors import DataError

MAX_GIGABYTES = 1.0
"""Default of `env.max_data_gb`."""
HOLE = 4096
"""Bytes of 0 in a row that are no text."""
VALUE_BYTES = 64
"""Estimated memory of a value, beside its characters."""


@final
class BoundedFile:
    """A regular file, and the memory that what was read of it takes, by an estimate.

    Args:
        path: The file.
        name: Name of the rows in messages, such as "train".
        gigabytes: The most that may be read, in units of 10^9 bytes.

    Raises:
        DataError: It is a pipe, a device or a socket, whose end nobody knows.
    """

    def __init__(self, path: Path, name: str, gigabytes: float = MAX_GIGABYTES) -> None:
        self.path, self.name = path, name
        self.left = self._limit = int(gigabytes * 1e9)
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError(
                f"{name}: cannot read {str(path)!r}: expected a regular file, got a pipe, a device "
                "or a socket; write its rows to a file"
            )

    def spend(self, count: int) -> None:
        """Count bytes of memory; refuse more than the limit."""
        self.left -= count
        if self.left < 0:
            raise DataError(
                f"{self.name}: {str(self.path)!r}: expected rows of at most "
                f"{self._limit / 1e9:g} GB in memory, got more; give a smaller file, or raise "
                "env.max_data_gb"
            )

    def open(self, newline: str | None = None) -> TextIO:
        """Open it as UTF-8 text, of which no more than the limit can be read."""
        # utf-8-sig: spreadsheets begin a file with a byte-order mark, which would become part of
        # a column's name.
        raw = io.BufferedReader(_Counted(self))
        return io.TextIOWrapper(raw, encoding="utf-8-sig", newline=newline)


class _Counted(io.RawIOBase):
    """The bytes of a file, counted as they are read."""

    def __init__(self, file: BoundedFile) -> None:
        self._file, self._inner = file, file.path.open("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] -- a writable buffer
        count = self._inner.readinto(buffer) or 0
        self._file.spend(count)
        # A hole, which takes no room on the disk, reads as bytes of 0.
        if count >= HOLE and not bytes(buffer[:count]).strip(b"\0"):
            raise DataError(
                f"{self._file.name}: cannot read {str(self._file.path)!r}: expected UTF-8 text, "
                "got bytes of 0; save it as UTF-8"
            )
        return count

    def close(self) -> None:
        self._inner.close()
        super().close()
