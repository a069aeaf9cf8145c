"""The process of one tracker: entries come as lines of JSON, the package writes them.

In a process of its own, since these packages keep global state, print, read the environment when
they are imported, and take processor time that training would wait for in one interpreter. It ends
once it has written all that it was told, also where whoever told it was killed, and some minutes
after that wherever it hangs.
"""

from __future__ import annotations

import json
import os
import queue
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from evo_grpo.printable import raised
from evo_grpo.trackers.backends.protocol import Backend, Progress
from evo_grpo.trackers.backends.registry import backend, environment
from evo_grpo.trackers.state import NoState, State
from evo_grpo.trackers.told import Beginning, Entry, entry_from_json

WAITING = 1000
"""Entries that are read before the first of them is written."""
NICENESS = 10
"""By how much the priority of this process is below that of the run, as in nice(1)."""


def main() -> int:
    """Write what comes in; returns 1 after a failure, which it tells in its output."""
    _step_back()
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what packages print goes with what they complain of
    try:
        write_all(sys.stdin)
    except Exception as error:  # whatever a package raises: the run is told, and goes on
        told.write(json.dumps({"failed": raised(error)}) + "\n")
        told.flush()
        raise
    told.write(json.dumps({"done": True}) + "\n")
    told.flush()
    return 0


def _step_back() -> None:
    """Leave the processor to what trains, while packages are imported above all.

    Linux shares it out by sessions first (autogroups), and this process has one of its own.
    """
    with suppress(OSError):
        os.nice(NICENESS)
    with suppress(OSError):  # no Linux, a kernel without them, or not permitted
        Path("/proc/self/autogroup").write_text(str(NICENESS), encoding="ascii")


def write_all(lines: TextIO) -> None:
    """Write entries to a tracker.

    Args:
        lines: A beginning, then entries, then null. A process that was forked from the run may hold
            the other end open, so its end alone would not do.
    """
    first = lines.readline()
    if not first:
        return
    beginning = Beginning(**json.loads(first))
    entries = _Entries(lines, beginning.patience)
    for name, value in environment(beginning).items():
        os.environ.setdefault(name, value)
    state = NoState() if beginning.state is None else State(Path(beginning.state))
    try:
        _write(beginning, entries, state)
    finally:
        state.close()


def _write(beginning: Beginning, entries: _Entries, state: State | NoState) -> None:
    so_far = state.read()
    written: Backend = backend(beginning.kind)
    so_far = Progress(written.begin(beginning, so_far), so_far.place)
    state.keep(so_far)
    for entry in entries:
        # A round that was interrupted is played again, to the same bits.
        if entry.place > so_far.place:
            written.log(entry)
            so_far = Progress(so_far.id, entry.place)
            state.keep(so_far)
    written.end()


class _Entries:
    """Reads entries on a thread, so that whoever writes them need not wait for the tracker.

    Args:
        lines: They.
        patience: Seconds after the last of them until the process ends wherever it is.
    """

    def __init__(self, lines: TextIO, patience: float) -> None:
        self._lines = lines
        self._patience = patience
        self._read: queue.Queue[Entry | None] = queue.Queue(WAITING)
        threading.Thread(target=self._work, name="entries", daemon=True).start()

    def __iter__(self) -> Iterator[Entry]:
        """Yield each entry once."""
        while (entry := self._read.get()) is not None:
            yield entry

    def _work(self) -> None:
        try:
            for line in self._lines:
                # Whoever has written half a line was killed in the middle of it.
                data = json.loads(line) if line.endswith("\n") else None
                if data is None:
                    break
                self._put(entry_from_json(data))
        finally:
            self._end_some_time()
            self._put(None)

    def _put(self, entry: Entry | None) -> None:
        while True:
            try:
                self._read.put(entry, timeout=1.0)
            except queue.Full:
                if self._is_alone():
                    self._end_some_time()
            else:
                return

    def _is_alone(self) -> bool:
        """Return whether nobody is left who could tell more."""
        poll = select.poll()
        poll.register(self._lines, 0)
        return any(event & select.POLLHUP for _, event in poll.poll(0))

    def _end_some_time(self) -> None:
        if not any(thread.name == "end" for thread in threading.enumerate()):
            timer = threading.Timer(self._patience, os._exit, (1,))
            timer.name, timer.daemon = "end", True
            timer.start()


if __name__ == "__main__":
    sys.exit(main())
