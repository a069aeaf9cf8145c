"""What reads the log of a run, and how far it is.

The log is the queue between a run and what watches it: a reader that hangs, fails, is slow or is
killed costs the run nothing, and goes on from its cursor, which moves after a flush, or where the
reader cannot flush when it is closed.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Protocol, final

from evo_grpo.errors import CheckpointError, RunDirError
from evo_grpo.record.files import atomic_write, to_line, writing
from evo_grpo.record.folder import expect_run
from evo_grpo.record.log import START, Cursor, Entry, StepDone, entries
from evo_grpo.record.names import READERS
from evo_grpo.record.plain import open_plain, read_plain

SECONDS_TO_KEEP = 1.0
"""How long the cursor may stand behind while steps are read."""
SECONDS_TO_SAY = 10.0
"""How long another process is waited for before a sentence says so."""

_log = logging.getLogger(__name__)


class Reader(Protocol):
    """Takes the entries of one run, oldest first; an entry that comes twice changes nothing.

    Attributes:
        id: What the run is called in what the reader feeds, such as the id of a wandb run; empty
            where it has no name there.
    """

    id: str

    def read(self, entry: Entry) -> None:
        """Take an entry."""
        ...

    def flush(self) -> bool:
        """Make durable what was read; return False where that waits, for `close` at the latest."""
        ...

    def close(self) -> None:
        """Make durable what was read; nothing more is to come."""
        ...


def feed(
    run: str | Path,
    name: str,
    make: Callable[[str], Reader],
    *,
    follow: bool = False,
    again: bool = False,
    moved: Callable[[Cursor, str], None] = lambda cursor, id: None,
    say: Callable[[str], None] = _log.warning,
) -> Cursor:
    """Give a reader what it has not read yet.

    Args:
        run: The run folder.
        name: Of the reader; its cursor is in `readers/<name>.json` of the folder.
        make: Makes the reader, given the id that it had before, empty at first. It is called when
            there is something to be read.
        follow: Wait for more until the run has ended.
        again: Begin with the start of the log, wherever the cursor is.
        moved: Called after each entry with how far the reader is and its id.
        say: Gets a sentence where another process feeds the reader, which is waited for.

    Returns:
        How far the reader is.

    Raises:
        RunNotFoundError: It is no run folder.
        CheckpointError: The log or the cursor is damaged.
        RunFailedError: The cursor cannot be written.
        RunDirError: The folder was replaced by another run.
    """
    folder = expect_run(run)
    with closing(Place(folder, name, say)) as place:
        at, reader = START if again else place.cursor, None
        moved(at, place.id)
        read = flushed = at
        for at, entry in entries(folder, at, follow=follow):  # noqa: B020 -- it moves on
            place.check()
            if reader is None:
                reader = make(place.id)
                # At once: one that is killed before its first flush goes on in the same run.
                place.keep(place.cursor, reader.id)
            try:
                reader.read(entry)
                read = at
                if reader.flush():
                    flushed = at
                    place.keep(at, reader.id, soon=isinstance(entry, StepDone))
            except BaseException:
                with suppress(Exception):  # the error is that of the entry
                    reader.close()
                    flushed = read
                if flushed != START:
                    with suppress(Exception):
                        place.keep(flushed, reader.id)
                raise
            moved(at, reader.id)
        if reader is not None:
            reader.close()
            place.keep(at, reader.id)
            moved(at, reader.id)
    return place.cursor


def id_of(run: Path, name: str) -> str:
    """Return the id of what a reader of a run feeds; empty where none has fed anything yet."""
    return _read(_file_of(run, name))[1]


@final
class Place:
    """The file that says how far a reader is with a run. One process has it at a time.

    Args:
        run: The run folder.
        name: Of the reader.
        say: Gets a sentence where another process has it for long.

    Attributes:
        cursor: How far it is.
        id: The id of what it feeds.

    Raises:
        CheckpointError: The file is damaged.
        RunFailedError: It cannot be written.
    """

    def __init__(self, run: Path, name: str, say: Callable[[str], None] = _log.warning) -> None:
        """Wait until no other process has it, then read it."""
        self._file = _file_of(run, name)
        self._locked = self._file.with_suffix(".lock")
        with writing(self._locked, f"follow --to {name.partition('-')[0]}"):
            self._file.parent.mkdir(exist_ok=True)
            self._lock = open_plain(self._locked, os.O_RDWR | os.O_CREAT)
        # A run that goes on begins where the reader of the run before, still at work, ends.
        self._wait(f"{run}: another process gives it to {name}; waiting until that ends", say)
        self._kept = -math.inf
        try:
            self.cursor, self.id = _read(self._file)
        except BaseException:
            self.close()
            raise

    def keep(self, cursor: Cursor, id: str, *, soon: bool = False) -> None:
        """Write how far the reader is; with `soon` a call `SECONDS_TO_KEEP` later may do it."""
        late = time.monotonic() >= self._kept + SECONDS_TO_KEEP
        if (cursor, id) == (self.cursor, self.id) or (soon and not late):
            return
        self.check()
        atomic_write(self._file, to_line({"id": id, "cursor": cursor.to_json()}) + "\n", "follow")
        self.cursor, self.id, self._kept = cursor, id, time.monotonic()

    def check(self) -> None:
        """Raise RunDirError where the folder is that of another run by now."""
        try:
            same = os.path.samestat(self._locked.lstat(), os.fstat(self._lock))
        except FileNotFoundError:
            same = False
        if not same:
            raise RunDirError(
                f"{self._file.parent}: cannot be written: the run was deleted or replaced by "
                "another one, which has readers of its own"
            )

    def _wait(self, busy: str, say: Callable[[str], None]) -> None:
        until: float | None = time.monotonic() + SECONDS_TO_SAY
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if until is not None and time.monotonic() > until:
                say(busy)
                until = None
            time.sleep(0.1)

    def close(self) -> None:
        """Let the next process have it."""
        os.close(self._lock)


def _file_of(run: Path, name: str) -> Path:
    return run / READERS / f"{name}.json"


def _read(file: Path) -> tuple[Cursor, str]:
    """Return how far a reader is, and the id of what it feeds."""
    if not os.path.lexists(file):
        return START, ""
    try:
        data = json.loads(read_plain(file))
        return Cursor.from_json(data["cursor"]), str(data["id"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: expected how far a reader is with the run, but {error}; delete it: the "
            "reader then begins with the first round again"
        ) from error
