"""What lies between a run and one tracker: a queue, and a thread that waits for the tracker."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from typing import final

from evo_grpo.printable import raised
from evo_grpo.trackers.outlets import Outlet, TrackerFailed
from evo_grpo.trackers.told import Beginning, Entry

WAITING = 256
"""Entries that may wait for a tracker; what comes while it is that far behind is left out."""
SECONDS_TO_GATHER = 1.0
"""So long the steps of a round wait for each other: to be woken costs more than to be told."""

_log = logging.getLogger(__name__)


@final
class Channel:
    """Tells one tracker of one run.

    Args:
        kind: Of the tracker, as warnings call it.
        outlet: Where the thread sends what it is told.
        beginning: What the tracker is told first.
    """

    def __init__(self, kind: str, outlet: Outlet, beginning: Beginning) -> None:
        self._kind = kind
        self._outlet = outlet
        self._entries: queue.Queue[Entry] = queue.Queue(WAITING)
        self._wake = threading.Event()
        self._ended = False
        self._failed = ""
        self._missed = 0
        self._written = threading.Event()
        # A daemon: a tracker that does not answer must not keep the process from its end.
        self._thread = threading.Thread(
            target=self._work, args=(beginning,), name=f"tracker-{kind}", daemon=True
        )
        self._thread.start()

    @property
    def trouble(self) -> str:
        """What went wrong, as a warning says it; empty where nothing has."""
        why = self._failed
        if not why and self._missed:
            why = f"it was too slow, and misses {self._missed} entries"
        end = "the run goes on, and its own files have everything"
        return f"tracker {self._kind}: {why}; {end}" if why else ""

    @property
    def failed(self) -> bool:
        """Whether the tracker has failed, and is to be told no more."""
        return bool(self._failed)

    def put(self, entry: Entry, *, soon: bool) -> None:
        """Take an entry, and wait for nothing.

        Args:
            entry: It.
            soon: Tell the tracker at once.
        """
        try:
            self._entries.put_nowait(entry)
        except queue.Full:
            self._missed += 1
        if soon or self._entries.qsize() > WAITING // 2:
            self._wake.set()

    def end(self) -> None:
        """Ask for what waits to be written; nothing more is to come. It may be asked again."""
        self._ended = True
        self._wake.set()

    def wait(self, until: float, seconds: float, *, stopped: bool) -> None:
        """Wait until all is written; leave a tracker that takes too long.

        Args:
            until: When to leave it, by the monotonic clock.
            seconds: How long that was from the end of the run on, for the warning.
            stopped: That its process goes on alone is nothing to warn of.
        """
        if not self._thread.is_alive():  # also in a fork of this process, which has no such thread
            return
        if self._written.wait(max(0.0, until - time.monotonic())):
            return
        if not self._outlet.leave():
            self._failed = self._failed or f"it has not written all within {seconds:g} s"
            self._thread.join(1.0)
        elif not stopped and not self._written.is_set():
            self._failed = f"it is still writing after {seconds:g} s, in its own process"

    def _work(self, beginning: Beginning) -> None:
        try:
            self._outlet.begin(beginning)
            for told in self._batches():
                self._outlet.log(told)
            self._outlet.end()
        except TrackerFailed as error:
            self._failed = self._failed or str(error)
        except BaseException as error:  # whatever a tracker raises: the run goes on without it
            _log.exception("tracker %s", self._kind)
            self._failed = self._failed or raised(error)
        self._written.set()
        self._outlet.close()

    def _batches(self) -> Iterator[list[Entry]]:
        """Yield what has come, until the end."""
        ended = False
        while not ended:
            self._wake.wait(SECONDS_TO_GATHER)
            self._wake.clear()
            ended = self._ended  # asked before: nothing comes after the end
            told = [self._entries.get_nowait() for _ in range(self._entries.qsize())]
            if told:
                yield told
