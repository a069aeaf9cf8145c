"""Delivers trials from a thread of its own, while the run trains."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from types import TracebackType
from typing import Self, final

from evo_grpo.printable import raised
from evo_grpo.record.sending import Sender

SECONDS_TO_STOP = 2.0
"""So long an interrupted run waits for the trial that is on its way."""
SECONDS_WITHOUT_TRIAL = 10.0
"""So long a finished run waits for the next trial to be added."""
SECONDS_TO_FINISH = 120.0
"""So long a finished run waits for all trials that are not there yet."""
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
"""Between two attempts, which grow rarer while the database is gone."""

_log = logging.getLogger(__name__)


@final
class Delivery:
    """Sends the trials of a run from a thread of its own; the run waits for it at its end alone.

    A database that is gone ends nothing: what it lacks is sent once it is back.

    Args:
        sender: What sends; it belongs to the thread from now on.
        end: The length of the rounds that are finished already.
        command: How the rest is delivered once the run is over.
    """

    def __init__(self, sender: Sender, end: int, command: str) -> None:
        self._sender = sender
        self._command = command
        self._end = end
        # Each request has a number; what a send did not know of when it began is sent once more.
        self._asked, self._done = 1, 0
        self._changed = threading.Condition()
        self._finishing = self._stopping = False
        self._gone = self._broken = ""
        self._notes: list[str] = []
        # A daemon: a server that does not answer must not keep the process from its end.
        self._thread = threading.Thread(target=self._work, name="delivery", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        """Return the delivery."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait until all is delivered, within bounds; after an error for hardly anything."""
        try:
            if error is None:
                self._finish()
        finally:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            self._thread.join(SECONDS_TO_STOP)
        if error is None:
            self._note_what_is_left()
        self.tell()

    def wake(self, end: int) -> None:
        """Deliver the rounds up to a byte of rounds.jsonl."""
        with self._changed:
            self._end = end
            self._asked += 1
            self._changed.notify_all()

    def tell(self) -> None:
        """Warn of what happened since; to be called by the thread that trains."""
        with self._changed:
            notes, self._notes = self._notes, []
        for note in notes:
            warnings.warn(note, UserWarning, stacklevel=2)

    def _finish(self) -> None:
        """Wait for what is on its way, as long as trials arrive."""
        started = latest = time.monotonic()
        with self._changed:
            self._finishing = True
            self._asked += 1  # summary.json is there by now
            self._changed.notify_all()
            added = self._sender.added
            while self._done != self._asked and not self._broken:
                self._changed.wait(0.1)
                now = time.monotonic()
                if self._sender.added != added:
                    added, latest = self._sender.added, now
                if now - latest > SECONDS_WITHOUT_TRIAL or now - started > SECONDS_TO_FINISH:
                    return

    def _note_what_is_left(self) -> None:
        # After the thread's last attempt: one that took long knows only then what is wrong.
        with self._changed:
            if self._done != self._asked and not self._broken:
                why = f" ({self._gone})" if self._gone else ""
                self._notes.append(
                    f"record.storage: not all trials are in {self._sender.url} yet{why}; "
                    f"deliver the rest with: {self._command}"
                )

    def _work(self) -> None:
        wait = _FIRST_WAIT
        try:
            while (asked := self._next()) is not None:
                if self._attempt(*asked):
                    wait = _FIRST_WAIT
                else:
                    self._pause(wait)
                    wait = min(2 * wait, _LONGEST_WAIT)
            self._sender.close()
        except Exception as error:  # whatever it is: the run has recorded everything, and goes on
            _log.exception("delivery of trials")
            with self._changed:
                self._broken = raised(error)
                self._notes.append(
                    f"record.storage: no more trials are delivered to {self._sender.url} "
                    f"({self._broken}); the run goes on; deliver them later with: {self._command}"
                )
                self._changed.notify_all()

    def _next(self) -> tuple[int, int] | None:
        """Wait until there is something to send; None once this is over."""
        with self._changed:
            while self._done == self._asked and not self._stopping:
                self._changed.wait()
            return None if self._stopping else (self._asked, self._end)

    def _attempt(self, asked: int, end: int) -> bool:
        """Send; returns False where the database is gone."""
        from evo_grpo.record.database import Unreachable

        why, whole = "", False
        try:
            whole = self._sender.send(end, go_on=lambda: not self._stopping)
        except Unreachable as error:
            self._sender.close()
            why = str(error)
        with self._changed:
            self._notes += self._sender.notes
            self._sender.notes.clear()
            if why and not self._gone and not self._finishing:
                self._notes.append(
                    f"record.storage: {self._sender.url} cannot be reached ({why}); the run goes "
                    "on, and its trials are delivered once it is back"
                )
            elif self._gone and not why:
                _log.info("%s is back", self._sender.url)
            self._gone = why
            if whole:
                self._done = asked
                self._changed.notify_all()
        return not why

    def _pause(self, seconds: float) -> None:
        """Wait before another attempt; hardly at the end of the run, and not once this is over."""
        with self._changed:
            finishing = self._finishing
            until = time.monotonic() + (_FIRST_WAIT if finishing else seconds)
            while not self._stopping and self._finishing == finishing:
                left = until - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)
