"""Calls of the user's code under watch: one that hangs, forks, exits or changes modes is named.

A thread that hangs cannot be ended from outside. Calls in the main thread are therefore made there,
where a signal interrupts them; a second thread only looks at the clock. In any other thread, which
no signal reaches, the calls move to a helper thread that is left behind when one hangs.
"""

from __future__ import annotations

import contextvars
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

from evo_grpo.envs.rewards.modes import look, put_back
from evo_grpo.errors import RewardAbortError
from evo_grpo.printable import cut

GRACE_SECONDS = 5.0
"""How long a call that was interrupted may take to end before the process does."""

_IDLE_SECONDS = 1.0
#: Ignored by whoever does not expect it, and used by hardly anybody.
_SIGNAL = signal.SIGURG
_process = os.getpid
_exit = os._exit
_REAL: dict[str, Callable[..., Any]] = {"_exit": _exit, "execv": os.execv, "execve": os.execve}
"""What ends this program in silence, with a code that may look like success."""

ResultT = TypeVar("ResultT")


class Call(NamedTuple):
    """A call of the user's code: what it is for messages, the function, arguments by name."""

    title: Callable[[], str]
    fn: Callable[..., Any]
    arguments: Mapping[str, Any]


class TimedOut(BaseException):
    """Raised in a call by the signal; no Exception, so that `except Exception` lets it pass."""


class ExitedError(BaseException):
    """Raised in a call in place of `os._exit`; no Exception, so `except Exception` lets it pass."""


class Watch:
    """Makes calls one after the other, of `limit` seconds at most; get one from `watching`."""

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self._running: Call | None = None
        self._began = 0.0
        self._late: Call | None = None
        self._pid = os.getpid()
        self._modes = look()
        self.thread = threading.get_ident()
        self._exited = ""
        self._left_behind = False

    def run(self, call: Call, allowance: float = 0.0) -> Any:  # noqa: ANN401 -- what the call returns
        """Make a call; with an allowance beyond the limit the caller then calls `check`.

        Raises:
            RewardAbortError: It took longer, would have ended the process, or left the working
                folder or one of torch's modes changed.
            BaseException: Whatever the function raises.
        """
        returned = False
        self._began = time.monotonic() + allowance
        self._running = call
        try:
            result = call.fn(**call.arguments)
            returned = True
        except TimedOut:
            raise self.too_long(call) from None
        except ExitedError:
            raise self.exited(call) from None
        finally:
            self._running = None
            if _process() != self._pid:
                # Two processes would write the same files.
                _end_with(
                    f"warning: {call.title()}: it forked the process and came back twice; the "
                    f"copy, process {os.getpid()}, is ended here\n"
                )
            # Looked at after each call, so that the right one is named: 3 microseconds.
            if not self._left_behind and look() != self._modes:
                self._examine(call, returned=returned)
        if not allowance:
            self.check(call)
        return result

    def check(self, call: Call) -> None:
        """Refuse the result of a call that caught its interruption itself."""
        if self._late is call:
            raise self.too_long(call)
        if self._exited:
            raise self.exited(call)

    def _examine(self, call: Call, *, returned: bool) -> None:
        """Put back what a call changed, and name it unless its own error goes on to the caller."""
        left = put_back(self._modes)
        self._modes = look()  # also where the call loaded torch
        if left and returned:
            raise RewardAbortError(f"{call.title()}: it left {left}")

    def exited(self, call: Call) -> RewardAbortError:
        """Return the error of a call that would have ended the process."""
        return RewardAbortError(
            f"{call.title()}: it called {self._exited}, which would end the run in silence; "
            "expected it to return: raise an error instead, or return None from a reward function "
            "for what cannot be scored"
        )

    def exits(self, called: str) -> None:
        """Raise `ExitedError` in the call that would end the process by what it called."""
        call, self._exited = self._running, called
        if call is None:  # it returned meanwhile, and another thread goes on
            return
        if threading.get_ident() == self.thread:
            raise ExitedError
        _end_with(f"error: {self.exited(call)}\n")

    @property
    def is_calling(self) -> bool:
        """Whether a call runs, in this process and not in a fork of it."""
        return self._running is not None and _process() == self._pid

    def too_long(self, call: Call) -> RewardAbortError:
        """Return the error of a call that took longer than the limit."""
        return RewardAbortError(
            f"{call.title()}: expected a result within {self.limit:g} s, got none; mend what it "
            "waits for, raise env.reward_timeout, or set env.isolate: process, which stops what "
            "cannot be interrupted"
        )

    def here(self, work: Callable[[], ResultT]) -> ResultT:
        """Do work in the main thread, where a signal interrupts a call that takes too long."""
        over = threading.Event()
        before = signal.signal(_SIGNAL, self._interrupt)
        clock = threading.Thread(target=self._look, args=(over,), name="reward-clock", daemon=True)
        clock.start()
        try:
            return work()
        finally:
            over.set()
            signal.signal(_SIGNAL, before)

    def elsewhere(self, work: Callable[[], ResultT]) -> ResultT:
        """Do work in a helper thread, and leave that behind when a call takes too long."""

        def helper() -> ResultT:
            # Modes such as torch's belong to a thread: those of the helper count.
            self._modes, self.thread = look(), threading.get_ident()
            return work()

        result = in_a_thread("rewards", helper)
        while not wait([result], self._pause()).done:
            if (call := self._overdue()) is not None:
                self._left_behind = True  # when it ends, the modes are somebody else's
                raise self.too_long(call)
        return result.result()

    def _look(self, over: threading.Event) -> None:
        """Interrupt a call that is late, and end the process where that does not end the call."""
        sent: Call | None = None
        while not over.wait(self._pause() if sent is None else GRACE_SECONDS):
            call = self._overdue()
            if call is not None and call is sent:
                _end_with(f"error: {self.too_long(call)}\n")
            sent = call
            if call is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def _interrupt(self, number: int, frame: object) -> None:
        """Raise in the call that is late; a signal that arrives after its end does nothing."""
        del number, frame
        call = self._overdue()
        if call is not None and self._late is not call:
            self._late = call
            raise TimedOut

    def _overdue(self) -> Call | None:
        """Return the call that takes too long, None where there is none."""
        call = self._running
        late = self.limit is not None and time.monotonic() - self._began >= self.limit
        return call if late else None

    def _pause(self) -> float:
        """Return the seconds until a call can be late."""
        limit = self.limit or 0.0
        left = self._began + limit - time.monotonic() if self._running is not None else limit
        return min(max(left, 0.02), _IDLE_SECONDS)


_watches: list[Watch] = []
_lock = threading.Lock()


@contextmanager
def _exits_refused(watch: Watch) -> Generator[None]:
    """Stand in for `os._exit` and its kin in a `with` block; several threads may be in one."""
    with _lock:
        _watches.append(watch)
        for name in _REAL:
            setattr(os, name, partial(_called, name))
    try:
        yield
    finally:
        with _lock:
            _watches.remove(watch)
            if not _watches:
                for name, real in _REAL.items():
                    setattr(os, name, real)


def _called(name: str, *arguments: object, **more: object) -> Any:  # noqa: ANN401 -- what the real one returns
    # By its thread, of several that call; a thread that a call has started is of the latest.
    calling = [watch for watch in _watches if watch.is_calling]
    calling.sort(key=lambda watch: watch.thread == threading.get_ident())
    if calling:
        first = [*arguments, *more.values()][:1]  # the others may hold secrets
        calling[-1].exits(f"os.{name}({cut(', '.join(map(repr, first)))})")
    return _REAL[name](*arguments, **more)


def watching(limit: float | None, work: Callable[[Watch], ResultT]) -> ResultT:
    """Do work whose calls, made with `Watch.run`, may take `limit` seconds each; None is no limit.

    Raises:
        RewardAbortError: See `Watch.run`.
    """
    watch = Watch(limit)
    with _exits_refused(watch):
        if limit is None:
            return work(watch)
        if threading.current_thread() is threading.main_thread():
            return watch.here(lambda: work(watch))
        return watch.elsewhere(lambda: work(watch))


def in_a_thread(name: str, work: Callable[[], ResultT]) -> Future[ResultT]:
    """Do work in a thread of its own, which does not hold up the end of the process."""
    result: Future[ResultT] = Future()

    def helper() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # raised in the thread that asks for the result
            result.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(helper,), name=name, daemon=True).start()
    return result


def _end_with(text: str) -> NoReturn:
    sys.stderr.write(text)
    sys.stderr.flush()
    _exit(1)
