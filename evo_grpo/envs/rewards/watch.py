"""Call user code with a time limit, name a call that is late, and undo the modes that it changes.

No thread can end another one, so where a call runs depends on the thread that asks for it. In the
main thread it runs there, because `signal.alarm`, as math_verify uses it, and the connections of
sqlite3 need that, and a signal interrupts it. In any other thread, which no signal reaches, it runs
in a helper thread, which is abandoned if the call is late. Calls that exit, fork or block all
threads are left to `env.isolate: process`.
"""

from __future__ import annotations

import contextvars
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from operator import methodcaller
from typing import Any, NamedTuple, TypeVar

from evo_grpo.errors import RewardAbortError
from evo_grpo.model.alone import beside_no_load

GRACE_SECONDS = 5.0
"""Seconds between the interruption of a call and the end of the process, if the call continues."""

_SIGNAL = signal.SIGURG  # ignored by default, and rarely used
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


class Watch:
    """Makes calls one after the other, each within `limit` seconds; `watching` creates one."""

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self._running: Call | None = None
        self._began = 0.0
        self._interrupted: Call | None = None
        self._modes: list[object] = []
        self.abandoned = False

    def run(self, call: Call, allowance: float = 0.0) -> Any:  # noqa: ANN401 -- what the call returns
        """Make a call.

        Args:
            call: The call.
            allowance: Seconds beyond the limit. If it is above 0, use `check` afterwards.

        Raises:
            RewardAbortError: The call took longer, or left one of `MODES` changed.
            BaseException: Any exception of the function.
        """
        check_not_stopped()
        self._modes = self._modes or current_modes()  # of the thread of the first call
        self._began = time.monotonic() + allowance
        self._running = call
        try:
            result = call.fn(**call.arguments)
        except TimedOut:
            raise self.too_long(call) from None
        finally:
            self._running = None
            # After each call, to name the right one; a call that was given up has no say any more.
            changed = "" if self.abandoned else restore(self._modes)
        if changed:
            raise RewardAbortError(f"{call.title()}: it left {changed}")
        if not allowance:
            self.check(call)
        return result

    def check(self, call: Call) -> None:
        """Raise the error of a call that caught its own interruption."""
        if self._interrupted is call:
            raise self.too_long(call)

    def too_long(self, call: Call) -> RewardAbortError:
        """Return the error of a call that took longer than the limit."""
        return RewardAbortError(
            f"{call.title()}: expected a result within {self.limit:g} s, got none; mend what it "
            "waits for, raise env.reward_timeout, or set env.isolate: process, which stops what "
            "cannot be interrupted"
        )

    def late_call(self, done: Future[Any]) -> Call | None:
        """Wait until all is done; return a call that is late as soon as there is one."""
        limit = self.limit or 0.0
        while not wait([done], min(limit, 1.0) / 4).done:
            call = self._running
            if call is not None and time.monotonic() - self._began >= limit:
                return call
        return None

    def interrupt_late_calls(self, done: Future[Any]) -> None:
        """Interrupt a call of the main thread that is late; end the process if it continues."""
        while (call := self.late_call(done)) is not None:
            self._interrupted = call
            signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
            if not wait([done], GRACE_SECONDS).done and self._running is call:
                print(f"error: {self.too_long(call)}", file=sys.stderr, flush=True)
                os._exit(1)

    def handle(self, *_: object) -> None:
        """Raise `TimedOut` in the call that is late; ignore a signal that arrives after its end."""
        if self._running is not None and self._running is self._interrupted:
            raise TimedOut


def watching(limit: float | None, work: Callable[[Watch], ResultT]) -> ResultT:
    """Do work whose calls, made by `Watch.run`, may take `limit` seconds each; None is no limit.

    Raises:
        RewardAbortError: See `Watch.run`.
    """
    watch = Watch(limit)
    if limit is None:
        return work(watch)
    if threading.current_thread() is not threading.main_thread():
        result = in_a_thread("rewards", lambda: work(watch))
        if (late := watch.late_call(result)) is not None:
            watch.abandoned = True
            raise watch.too_long(late)
        return result.result()
    done: Future[None] = Future()
    before = signal.signal(_SIGNAL, watch.handle)
    in_a_thread("reward-clock", lambda: watch.interrupt_late_calls(done))
    try:
        return work(watch)
    finally:
        done.set_result(None)
        signal.signal(_SIGNAL, before)


class Mode(NamedTuple):
    """A mode: its name, a module, what reads it, and the function of the module that sets it."""

    name: str
    module: str
    read: Callable[[Any], object]
    set: str
    arguments: tuple[str, ...] = ()


MODES = (
    Mode("the working folder", "os", methodcaller("getcwd"), "chdir"),
    Mode("gradients", "torch", methodcaller("is_grad_enabled"), "set_grad_enabled"),
    *(
        Mode(name, "torch", methodcaller("is_autocast_enabled", on), "set_autocast_enabled", (on,))
        for name, on in (("autocast on the CPU", "cpu"), ("autocast on CUDA", "cuda"))
    ),
    # A sixth of the time of get_default_device.
    Mode("default device", "torch", lambda torch: torch.empty(0).device, "set_default_device"),
    *(
        Mode(name.replace("_", " "), "torch", methodcaller(f"get_{name}"), f"set_{name}")
        for name in ("default_dtype", "float32_matmul_precision", "deterministic_debug_mode")
    ),
    Mode("number of threads", "torch", methodcaller("get_num_threads"), "set_num_threads"),
)
"""What the process or a thread has once, and the run depends on; it does not draw from the global
random generators."""


@beside_no_load()
def current_modes() -> list[object]:
    """Return the value of each mode; that of the working folder alone if torch is not loaded."""
    return _values()


def _values() -> list[object]:
    loaded = hasattr(sys.modules.get("torch"), "compile")  # another thread may be loading it
    return [_value(mode) for mode in (MODES if loaded else MODES[:1])]


def _value(mode: Mode) -> object:
    try:
        return mode.read(sys.modules[mode.module])
    except Exception as error:  # a removed folder, a missing device, a precision set by its parts
        return f"a value that cannot be read ({type(error).__name__})"


def restore(before: list[object]) -> str:
    """Set every mode to the value that `current_modes` returned before.

    Returns:
        The modes that had changed, with a remedy; "" if none had.
    """
    if _values() == before:  # nearly always, so without waiting for a load in another thread
        return ""
    changed: list[str] = []
    # Not strict: the call may have loaded torch.
    for mode, old, new in zip(MODES, before, current_modes(), strict=False):
        if old != new:
            value = None if str(old) == "cpu" else old  # None removes a default device
            with suppress(Exception), beside_no_load():  # a folder that was removed
                getattr(sys.modules[mode.module], mode.set)(*mode.arguments, value)
            owner = "torch's " if mode.module == "torch" else ""
            changed.append(f"{owner}{mode.name} at {new} instead of {old}")
    remedy = "; change it in a with statement, or set it back before the call returns"
    return " and ".join(changed) + remedy if changed else ""


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
