"""Calls of the user's code under watch: one that hangs, forks or turns gradients off is named.

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
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol, TypeVar

from evo_grpo.errors import RewardAbortError

GRACE_SECONDS = 5.0
"""How long a call that was interrupted may take to end before the process does."""

_IDLE_SECONDS = 1.0
#: Ignored by whoever does not expect it, and used by hardly anybody.
_SIGNAL = signal.SIGURG
_process = os.getpid
_modules = sys.modules

ResultT = TypeVar("ResultT")


class Named(Protocol):
    """A call that can say which one it is."""

    def title(self) -> str:
        """Return function, row and prompt, for messages."""
        ...


class TimedOut(BaseException):
    """Raised in a call by the signal; no Exception, so that `except Exception` lets it pass."""


class Watch:
    """Makes calls one after the other; get one from `watching`.

    Args:
        limit: Seconds that one call may take; None is no limit.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self._running: Named | None = None
        self._began = 0.0
        self._late: Named | None = None
        self._pid = os.getpid()
        self._over = threading.Event()
        self._gradients = gradients()

    def run(
        self,
        call: Named,
        fn: Callable[..., ResultT],
        arguments: Mapping[str, Any],
        allowance: float = 0.0,
    ) -> ResultT:
        """Make a call.

        Args:
            call: Which one.
            fn: What is called.
            arguments: With what, by name.
            allowance: Seconds that it may take beyond the limit; the caller then calls `check`.

        Raises:
            RewardAbortError: It took longer, or left gradients off.
            BaseException: Whatever the function raises.
        """
        self._began = time.monotonic() + allowance
        self._running = call
        try:
            result = fn(**arguments)
        except TimedOut:
            raise self.too_long(call) from None
        finally:
            self._running = None
            # One look costs as much as a call of a short function, so it is one expression.
            if _process() != self._pid or gradients() is not self._gradients:
                self._examine(call)
        if not allowance:
            self.check(call)
        return result

    def check(self, call: Named) -> None:
        """Refuse the result of a call that caught its interruption itself.

        Raises:
            RewardAbortError: It took longer than the limit.
        """
        if self._late is call:
            raise self.too_long(call)

    def _examine(self, call: Named) -> None:
        """Say what a call changed: the process, or torch's modes."""
        if os.getpid() != self._pid:
            _end_copy(call)
        before = True if self._gradients is None else self._gradients
        self._gradients = gradients()
        if self._gradients is None or self._gradients == before:
            return  # it loaded torch
        left = "on" if self._gradients else "off"
        sys.modules["torch"].set_grad_enabled(before)
        raise RewardAbortError(
            f"{call.title()}: it left torch's gradients {left}; use "
            "torch.no_grad(), torch.inference_mode() or torch.enable_grad() in a with statement"
        )

    def too_long(self, call: Named) -> RewardAbortError:
        """Return the error of a call that took longer than the limit."""
        return RewardAbortError(
            f"{call.title()}: expected a result within {self.limit:g} s, got none; mend what it "
            "waits for, raise env.reward_timeout, or set env.isolate: process, which stops what "
            "cannot be interrupted"
        )

    def here(self, work: Callable[[], ResultT]) -> ResultT:
        """Do work in the main thread, where a signal interrupts a call that takes too long."""
        before = signal.signal(_SIGNAL, self._interrupt)
        outer = _clock.watch
        _clock.look_at(self)
        try:
            return work()
        finally:
            _clock.look_at(outer)
            signal.signal(_SIGNAL, before)

    def elsewhere(self, work: Callable[[], ResultT]) -> ResultT:
        """Do work in a helper thread, and leave that behind when a call takes too long."""
        results: list[ResultT] = []
        errors: list[BaseException] = []

        def helper() -> None:
            try:
                results.append(work())
            except BaseException as error:  # raised again below, in the thread that asked
                errors.append(error)
            finally:
                self._over.set()

        # Modes such as torch's belong to a thread: those of the helper count.
        self._gradients = None
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(helper,), name="rewards", daemon=True).start()
        while not self._over.wait(self.pause()):
            if (call := self.overdue()) is not None:
                raise self.too_long(call)
        if errors:
            raise errors[0]
        return results[0]

    def overdue(self) -> Named | None:
        """Return the call that takes too long, None where there is none."""
        call = self._running
        late = self.limit is not None and time.monotonic() - self._began >= self.limit
        return call if late else None

    def pause(self) -> float:
        """Return the seconds until a call can be late."""
        limit = self.limit or 0.0
        left = self._began + limit - time.monotonic() if self._running is not None else limit
        return min(max(left, 0.02), _IDLE_SECONDS)

    def _interrupt(self, number: int, frame: object) -> None:
        """Raise in the call that is late; a signal that arrives after its end does nothing."""
        del number, frame
        call = self.overdue()
        if call is not None and self._late is not call:
            self._late = call
            raise TimedOut

    def give_up(self, call: Named) -> NoReturn:
        """End the process: what runs neither returns nor lets itself be interrupted."""
        sys.stderr.write(f"error: {self.too_long(call)}\n")
        sys.stderr.flush()
        os._exit(1)


class _Clock:
    """A thread that looks how long the main thread's calls take; one for the whole process.

    A thread of each batch's own would cost more than the calls of a short one.
    """

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()

    def look_at(self, watch: Watch | None) -> None:
        """Look at the calls of a watch from now on, or at none."""
        self.watch = watch
        if watch is None:
            return
        if self._thread is None or not self._thread.is_alive():  # the first time, or in a fork
            self._wake = threading.Event()
            self._thread = threading.Thread(target=self._run, name="reward-clock", daemon=True)
            self._thread.start()
        elif watch.limit is not None and watch.limit < 2 * _IDLE_SECONDS:
            self._wake.set()

    def _run(self) -> None:
        sent: Named | None = None
        while True:
            watch = self.watch
            pause = _IDLE_SECONDS if watch is None else watch.pause()
            self._wake.wait(pause if sent is None else GRACE_SECONDS)
            self._wake.clear()
            call = None if watch is None or watch is not self.watch else watch.overdue()
            if watch is not None and call is not None and call is sent:
                watch.give_up(call)
            sent = call
            if call is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)


_clock = _Clock()


def watching(limit: float | None, work: Callable[[Watch], ResultT]) -> ResultT:
    """Do work whose calls are watched.

    Args:
        limit: Seconds that one call may take; None is no limit.
        work: Makes its calls with `Watch.run`.

    Raises:
        RewardAbortError: A call took longer.
    """
    watch = Watch(limit)
    if limit is None:
        return work(watch)
    if threading.current_thread() is threading.main_thread():
        return watch.here(lambda: work(watch))
    return watch.elsewhere(lambda: work(watch))


def gradients() -> bool | None:
    """Return whether torch records gradients; None where nothing has loaded torch.

    Within `torch.inference_mode()` it records none.
    """
    torch = _modules.get("torch")
    # A second thread may be in the middle of loading it.
    return None if torch is None else getattr(torch, "is_grad_enabled", _nothing)()


def _nothing() -> None:
    return None


def _end_copy(call: Named) -> NoReturn:
    """End a process that a call forked off: two of them would write the same files."""
    sys.stderr.write(
        f"warning: {call.title()}: it forked the process and came back twice; the copy, process "
        f"{os.getpid()}, is ended here\n"
    )
    sys.stderr.flush()
    os._exit(1)
