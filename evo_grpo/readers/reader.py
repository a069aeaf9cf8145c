"""Feeds readers with the entries of a run's log, and saves their cursors.

The log is the queue between a run and its readers. A reader that hangs, fails or is killed does not
affect the run, and continues from its cursor later. A cursor is the position in the log up to which
a reader has read. It is saved after each flush that stored all entries, and when the reader closes.
"""

import fcntl
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, final

from pydantic import TypeAdapter

from evo_grpo.errors import RunDirError
from evo_grpo.record.files import atomic_write, to_line, writing
from evo_grpo.record.folder import expect_run, read_result
from evo_grpo.record.log import START, Cursor, Entry, StepDone, entries
from evo_grpo.record.names import READERS
from evo_grpo.record.plain import open_plain

SECONDS_BETWEEN_SAVES = 1.0
"""Least time between two saves of the cursor while steps are read."""
SECONDS_BEFORE_WARNING = 10.0
"""How long `feed` waits for another process that feeds the reader, before a warning."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Position:
    cursor: Cursor
    id: str


_POSITION = TypeAdapter(_Position)


class Reader(Protocol):
    """Processes the entries of one run, oldest first. Reading an entry twice has no further effect.

    Attributes:
        id: Name of the run in the target of the reader, such as the id of a wandb run, or empty.
    """

    id: str

    def read(self, entry: Entry) -> None:
        """Process an entry."""
        ...

    def flush(self) -> bool:
        """Write the entries read so far to disk or to the server; return whether all are stored."""
        ...

    def close(self) -> None:
        """Write all entries to disk or to the server, and release resources."""
        ...


def feed(
    run: str | Path,
    name: str,
    make: Callable[[str], Reader],
    *,
    follow: bool = False,
    from_start: bool = False,
    on_progress: Callable[[Cursor, str], None] = lambda cursor, id: None,
    warn: Callable[[str], None] = _log.warning,
) -> Cursor:
    """Pass the entries of a run's log to a reader, from its cursor on; return the new cursor.

    Args:
        run: The run folder.
        name: Name of the reader; its cursor is in `readers/<name>.json` of the folder.
        make: Constructs the reader from its saved id ("" if none); called at the first new entry.
        follow: Wait for new entries until the run has ended.
        from_start: Begin at the start of the log, not at the cursor.
        on_progress: Called with the cursor and the id of the reader, at first and after each entry.
        warn: Called with a message if this process waits for another process that feeds the reader.
    """
    folder = expect_run(run)
    with closing(ReaderFile(folder, name, warn)) as file:
        cursor, reader = START if from_start else file.cursor, None
        on_progress(cursor, file.id)
        last_read = last_flushed = cursor
        for cursor, entry in entries(folder, cursor, follow=follow):  # noqa: B020 -- cursor advances
            file.check()
            if reader is None:
                reader = make(file.id)
                # Save the id now: a reader that is killed before its first flush continues with it.
                file.save(file.cursor, reader.id)
            try:
                reader.read(entry)
                last_read = cursor
                if reader.flush():
                    last_flushed = cursor
                    file.save(cursor, reader.id, may_wait=isinstance(entry, StepDone))
            except BaseException:
                with suppress(Exception):  # raise the first error, not one of closing
                    reader.close()
                    last_flushed = last_read
                if last_flushed != START:
                    with suppress(Exception):
                        file.save(last_flushed, reader.id)
                raise
            on_progress(cursor, reader.id)
        if reader is not None:
            reader.close()
            file.save(cursor, reader.id)
            on_progress(cursor, reader.id)
    return file.cursor


def id_of(run: Path, name: str) -> str:
    """Return the saved id of a reader of a run, empty if there is none."""
    return _read(run, name)[1]


def _read(run: Path, name: str) -> tuple[Cursor, str]:
    """Return the saved cursor and id of a reader; the start of the log and "" if there are none."""
    description, file = "the cursor and the id of a reader", run / READERS / f"{name}.json"
    saved = read_result(file, _POSITION, description, f"follow {run}")
    return (START, "") if saved is None else (saved[1].cursor, saved[1].id)


@final
class ReaderFile:
    """The file with the cursor and the id of a reader, locked by one process at a time."""

    def __init__(self, run: Path, name: str, warn: Callable[[str], None] = _log.warning) -> None:
        """Wait until no other process has the lock, then read the file."""
        self._file = run / READERS / f"{name}.json"
        self._locked = self._file.with_suffix(".lock")
        with writing(self._locked, f"follow --to {name.partition('-')[0]}"):
            self._file.parent.mkdir(exist_ok=True)
            self._lock = open_plain(self._locked, os.O_RDWR | os.O_CREAT)
        # After a resume, the reader process of the earlier run may still be at work.
        self._wait(f"{run}: another process feeds the reader {name}; waiting for its end", warn)
        self._saved_at = -math.inf
        try:
            self.cursor, self.id = _read(run, name)
        except BaseException:
            self.close()
            raise

    def save(self, cursor: Cursor, id: str, *, may_wait: bool = False) -> None:
        """Write cursor and id; with `may_wait`, not twice within `SECONDS_BETWEEN_SAVES`."""
        is_due = time.monotonic() >= self._saved_at + SECONDS_BETWEEN_SAVES
        if (cursor, id) == (self.cursor, self.id) or (may_wait and not is_due):
            return
        self.check()
        atomic_write(self._file, to_line(asdict(_Position(cursor, id))) + "\n", "follow")
        self.cursor, self.id, self._saved_at = cursor, id, time.monotonic()

    def check(self) -> None:
        """Raise RunDirError if the folder was deleted or replaced by another run."""
        try:
            same = os.path.samestat(self._locked.lstat(), os.fstat(self._lock))
        except FileNotFoundError:
            same = False
        if not same:
            raise RunDirError(
                f"{self._file.parent}: expected the run that the reader began with, but it was "
                "deleted or replaced by another run; start the reader again with: evo-grpo follow"
            )

    def _wait(self, message: str, warn: Callable[[str], None]) -> None:
        until: float | None = time.monotonic() + SECONDS_BEFORE_WARNING
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if until is not None and time.monotonic() > until:
                warn(message)
                until = None
            time.sleep(0.1)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)
