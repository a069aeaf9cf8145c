"""Call user code with a time limit, and name a call that hangs, forks, exits or changes modes.

No thread can end another one from outside, so where a call runs depends on the thread that asks:

- In the main thread the call runs there, and a signal interrupts it. A second thread only watches
  the clock. Moving all calls to a pool of threads would break functions that need the main thread:
  `signal.alarm`, as the package math_verify uses it, raises in any other one, and objects such as a
  connection of sqlite3 refuse to be used from another thread than their own.
- In any other thread, which no signal reaches, the calls run in a helper thread, which is abandoned
  when one of them hangs.
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

from evo_grpo.envs.rewards.modes import current_modes, restore
from evo_grpo.errors import RewardAbortError
from evo_grpo.printable import shorten

GRACE_SECONDS = 5.0
"""Seconds between the interruption of a call and the end of the process, if the call continues."""

_IDLE_SECONDS = 1.0
#: Ignored by default, and rarely used.
_SIGNAL = signal.SIGURG
_process = os.getpid
_exit = os._exit
_REAL: dict[str, Callable[..., Any]] = {"_exit": _exit, "execv": os.execv, "execve": os.execve}
"""Functions that end this program without a message, and with an exit code that may be 0."""

_stop: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("stop", default=None)

ResultT = TypeVar("ResultT")


class Call(NamedTuple):
    """A call of user code: a function that returns its title for messages, the function, keywords.

    The title is built only for a message.
    """

    title: Callable[[], str]
    fn: Callable[..., Any]
    arguments: Mapping[str, Any]


class TimedOut(BaseException):
    """Raised by the signal in a call that is late; `except Exception` does not catch it."""


class ExitedError(BaseException):
    """Raised in a call in place of `os._exit`; `except Exception` does not catch it."""


class Watch:
    """Makes calls one after the other, each within `limit` seconds; `watching` creates one."""

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self._running: Call | None = None
        self._began = 0.0
        self._late: Call | None = None
        self._pid = os.getpid()
        self._modes = current_modes()
        self.thread = threading.get_ident()
        self._exited = ""
        self._abandoned = False

    def run(self, call: Call, allowance: float = 0.0) -> Any:  # noqa: ANN401 -- what the call returns
        """Make a call.

        Args:
            call: The call.
            allowance: Seconds beyond the limit. If it is above 0, use `check` afterwards.

        Raises:
            RewardAbortError: The call took longer, tried to end the process, or changed the working
                folder or one of torch's modes.
            BaseException: Any exception of the function.
        """
        check_not_stopped()
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
            # Compared after each call, in 3 microseconds, so that the message names the right one.
            if not self._abandoned and current_modes() != self._modes:
                self._restore_modes(call, returned=returned)
        if not allowance:
            self.check(call)
        return result

    def check(self, call: Call) -> None:
        """Raise the error of a call that caught its own interruption."""
        if self._late is call:
            raise self.too_long(call)
        if self._exited:
            raise self.exited(call)

    def _restore_modes(self, call: Call, *, returned: bool) -> None:
        """Restore the modes; name the call, unless it raised an error, which comes first."""
        changed = restore(self._modes)
        self._modes = current_modes()  # the call may have loaded torch, and its modes with it
        if changed and returned:
            raise RewardAbortError(f"{call.title()}: it left {changed}")

    def exited(self, call: Call) -> RewardAbortError:
        """Return the error of a call that tried to end the process."""
        return RewardAbortError(
            f"{call.title()}: it called {self._exited}, which would end the run in silence; "
            "expected it to return: raise an error instead, or return None from a reward function "
            "for a completion that cannot be scored"
        )

    def exits(self, called: str) -> None:
        """Raise `ExitedError` in the running call, which called a function of `_REAL`."""
        call, self._exited = self._running, called
        if call is None:  # the call has returned, but a thread that it started continues
            return
        if threading.get_ident() == self.thread:
            raise ExitedError
        _end_with(f"error: {self.exited(call)}\n")

    @property
    def is_calling(self) -> bool:
        """Whether a call runs in this process, and not in a fork of it."""
        return self._running is not None and _process() == self._pid

    def too_long(self, call: Call) -> RewardAbortError:
        """Return the error of a call that took longer than the limit."""
        return RewardAbortError(
            f"{call.title()}: expected a result within {self.limit:g} s, got none; mend what it "
            "waits for, raise env.reward_timeout, or set env.isolate: process, which stops what "
            "cannot be interrupted"
        )

    def in_main_thread(self, work: Callable[[], ResultT]) -> ResultT:
        """Do work in the main thread, where a signal interrupts a call that is late."""
        over = threading.Event()
        before = signal.signal(_SIGNAL, self._interrupt)
        clock = threading.Thread(
            target=self._watch_clock, args=(over,), name="reward-clock", daemon=True
        )
        clock.start()
        try:
            return work()
        finally:
            over.set()
            signal.signal(_SIGNAL, before)

    def in_helper_thread(self, work: Callable[[], ResultT]) -> ResultT:
        """Do work in a helper thread, and abandon the thread when a call is late."""

        def helper() -> ResultT:
            # Torch's modes belong to a thread: compare those of this one.
            self._modes, self.thread = current_modes(), threading.get_ident()
            return work()

        result = in_a_thread("rewards", helper)
        while not wait([result], self._pause()).done:
            if (call := self._overdue()) is not None:
                self._abandoned = True  # its modes are not restored when it ends
                raise self.too_long(call)
        return result.result()

    def _watch_clock(self, over: threading.Event) -> None:
        """Interrupt a call that is late, and end the process if the call then continues."""
        sent: Call | None = None
        while not over.wait(self._pause() if sent is None else GRACE_SECONDS):
            call = self._overdue()
            if call is not None and call is sent:
                _end_with(f"error: {self.too_long(call)}\n")
            sent = call
            if call is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def _interrupt(self, number: int, frame: object) -> None:
        """Raise `TimedOut` in the call that is late; ignore a signal that arrives after its end."""
        del number, frame
        call = self._overdue()
        if call is not None and self._late is not call:
            self._late = call
            raise TimedOut

    def _overdue(self) -> Call | None:
        """Return the running call if it is late, else None."""
        call = self._running
        late = self.limit is not None and time.monotonic() - self._began >= self.limit
        return call if late else None

    def _pause(self) -> float:
        """Return the seconds until a call can be late, within bounds."""
        limit = self.limit or 0.0
        left = self._began + limit - time.monotonic() if self._running is not None else limit
        return min(max(left, 0.02), _IDLE_SECONDS)


_watches: list[Watch] = []
_lock = threading.Lock()


@contextmanager
def _exits_refused(watch: Watch) -> Generator[None]:
    """Replace the functions of `_REAL` in a `with` block, which several threads may enter."""
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
    """Stand in for a function of `_REAL`: raise within a call, else call the real function."""
    # The watch of this thread; for a thread that a call has started, the latest watch.
    calling = [watch for watch in _watches if watch.is_calling]
    calling.sort(key=lambda watch: watch.thread == threading.get_ident())
    if calling:
        first = [*arguments, *more.values()][:1]  # the others may hold secrets
        calling[-1].exits(f"os.{name}({shorten(', '.join(map(repr, first)))})")
    return _REAL[name](*arguments, **more)


def watching(limit: float | None, work: Callable[[Watch], ResultT]) -> ResultT:
    """Do work whose calls, made by `Watch.run`, may take `limit` seconds each; None is no limit.

    Raises:
        RewardAbortError: See `Watch.run`.
    """
    watch = Watch(limit)
    with _exits_refused(watch):
        if limit is None:
            return work(watch)
        if threading.current_thread() is threading.main_thread():
            return watch.in_main_thread(lambda: work(watch))
        return watch.in_helper_thread(lambda: work(watch))


def check_not_stopped() -> None:
    """Raise RewardAbortError in a thread of `in_a_thread` whose result nobody waits for any more.

    Tested before each call of user code, and by whatever waits.
    """
    if (stop := _stop.get()) is not None and stop.is_set():
        raise RewardAbortError("rewards: what asked for them has ended")


def in_a_thread(
    name: str, work: Callable[[], ResultT], stop: threading.Event | None = None
) -> Future[ResultT]:
    """Start work in a thread with this name, which does not delay the end of the process.

    `stop` ends it before its next call of user code; see `check_not_stopped`.
    """
    result: Future[ResultT] = Future()

    def helper() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # raised in the thread that asks for the result
            result.set_exception(error)

    context = contextvars.copy_context()
    if stop is not None:
        context.run(_stop.set, stop)
    threading.Thread(target=context.run, args=(helper,), name=name, daemon=True).start()
    return result


def _end_with(text: str) -> NoReturn:
    """Write a text to standard error and end the process with code 1."""
    sys.stderr.write(text)
    sys.stderr.flush()
    _exit(1)
