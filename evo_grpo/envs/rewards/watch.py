"""Calls reward functions with a time limit, and restores global modes that they changed.

A call from the main thread runs in the main thread, because `signal.alarm` (as in math_verify) and
sqlite3 connections need that; a signal interrupts a late call. A call from any other thread runs in
a helper thread, which is abandoned if the call is late: Python cannot end a thread. Calls that
exit, fork or block all threads need `env.isolate: process`.
"""

import contextvars
import inspect
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from operator import methodcaller
from pathlib import Path
from types import CoroutineType
from typing import Any, NamedTuple, TypeGuard, TypeVar

from evo_grpo.envs.rewards.functions import hint
from evo_grpo.errors import RewardAbortError, RewardError
from evo_grpo.escaping import error_text
from evo_grpo.model.alone import excluding_loads

GRACE_SECONDS = 5.0
"""Seconds between the interruption of a call and the end of the process, if the call continues."""

_SIGNAL = signal.SIGURG  # ignored by default, and rarely used
_NOT_YOURS = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(__file__).parents[2], *map(sysconfig.get_path, ("stdlib", "purelib")))
)
_stop: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("stop", default=None)

ResultT = TypeVar("ResultT")


class Call(NamedTuple):
    """A call of user code: a function that builds its title, the function, and its keywords."""

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
        """Make a call, and return its result; `allowance` adds seconds to the limit.

        Raises RewardAbortError if the call took longer, or left one of `MODES` changed. After a
        call with `allowance`, the caller runs `check`, which finds a late call that caught
        `TimedOut`.
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
            # After each call, to name the call that changed a mode; an abandoned call is ignored.
            changed = "" if self.abandoned else restore(self._modes)
        if changed:
            raise RewardAbortError(f"{call.title()}: it left {changed}")
        if not allowance:
            self.check(call)
        return result

    def check(self, call: Call) -> None:
        """Raise RewardAbortError if `call` was late and caught `TimedOut`."""
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
        """Wait until `done` has a result or a call is late; return the late call, or None."""
        limit = self.limit or 0.0
        while not wait([done], min(limit, 1.0) / 4).done:
            call = self._running
            if call is not None and time.monotonic() - self._began >= limit:
                return call
        return None

    def interrupt_late_calls(self, done: Future[Any]) -> None:
        """Interrupt a late call of the main thread; end the process if the call continues."""
        while (call := self.late_call(done)) is not None:
            self._interrupted = call
            signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
            if not wait([done], GRACE_SECONDS).done and self._running is call:
                print(f"error: {self.too_long(call)}", file=sys.stderr, flush=True)
                os._exit(1)

    def handle(self, *_: object) -> None:
        """Handle the signal: raise `TimedOut` if the late call still runs, else do nothing."""
        if self._running is not None and self._running is self._interrupted:
            raise TimedOut


def watching(limit: float | None, work: Callable[[Watch], ResultT]) -> ResultT:
    """Run `work` with a `Watch` that gives each call `limit` seconds; None is no limit."""
    watch = Watch(limit)
    if limit is None:
        return work(watch)
    if threading.current_thread() is not threading.main_thread():
        result = in_a_thread("rewards", lambda: work(watch))
        if (late := watch.late_call(result)) is not None:
            watch.abandoned = True
            raise watch.too_long(late)
        return result.result()
    work_done: Future[None] = Future()
    before = signal.signal(_SIGNAL, watch.handle)
    in_a_thread("reward-clock", lambda: watch.interrupt_late_calls(work_done))
    try:
        return work(watch)
    finally:
        work_done.set_result(None)
        signal.signal(_SIGNAL, before)


class Mode(NamedTuple):
    """A global mode: its name, module and getter, and its setter's name and first arguments."""

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
    # This takes a sixth of the time of get_default_device.
    Mode("default device", "torch", lambda torch: torch.empty(0).device, "set_default_device"),
    *(
        Mode(name.replace("_", " "), "torch", methodcaller(f"get_{name}"), f"set_{name}")
        for name in ("default_dtype", "float32_matmul_precision", "deterministic_debug_mode")
    ),
    Mode("number of threads", "torch", methodcaller("get_num_threads"), "set_num_threads"),
)
"""State of the process or of a thread on which the run depends. The global random generators are
not part of it, because the run draws nothing from them."""


@excluding_loads()
def current_modes() -> list[object]:
    """Return the value of each mode, or of the working folder alone if torch is not loaded."""
    return _values()


def _values() -> list[object]:
    loaded = hasattr(sys.modules.get("torch"), "compile")  # another thread may be loading it
    values: list[object] = []
    for mode in MODES if loaded else MODES[:1]:
        try:
            values.append(mode.read(sys.modules[mode.module]))
        except Exception as error:  # a removed folder, a missing device, a precision set in parts
            values.append(f"a value that cannot be read ({type(error).__name__})")
    return values


def restore(before: list[object]) -> str:
    """Set changed modes back to the values in `before`; return their names and a remedy, or ""."""
    if _values() == before:  # nearly always, so without waiting for a load in another thread
        return ""
    changed: list[str] = []
    # Not strict: the call may have loaded torch.
    for mode, old, new in zip(MODES, before, current_modes(), strict=False):
        if old != new:
            value = None if str(old) == "cpu" else old  # None removes a default device
            with suppress(Exception), excluding_loads():  # a folder that was removed
                getattr(sys.modules[mode.module], mode.set)(*mode.arguments, value)
            owner = "torch's " if mode.module == "torch" else ""
            changed.append(f"{owner}{mode.name} at {new} instead of {old}")
    remedy = "; change it in a with statement, or set it back before the call returns"
    return " and ".join(changed) + remedy if changed else ""


def check_not_stopped() -> None:
    """Raise RewardAbortError in a thread of `in_a_thread` whose result is no longer awaited."""
    if (stop := _stop.get()) is not None and stop.is_set():
        raise RewardAbortError("rewards: what asked for them has ended")


def in_a_thread(
    name: str, work: Callable[[], ResultT], stop: threading.Event | None = None
) -> Future[ResultT]:
    """Run `work` in a daemon thread called `name`; return the future of its result.

    Once `stop` is set, the thread ends before its next call of user code.
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


#: Types of most results: `inspect.isawaitable` takes longer than computing such a result.
_NUMBERS = frozenset({float, int, bool, type(None)})

ASYNC_ALLOWANCE = 1.0
"""Seconds beyond the limit after which async calls are interrupted together."""


def run_calls(
    calls: Sequence[Call],
    timeout: float | None,
    mark: Callable[[int], None] | None,
    *,
    keep_errors: bool,
) -> list[Any]:
    """Make calls in turn, and await the results of the async ones together.

    Works inside a running event loop, as in a notebook: async calls then run in another thread.
    Each call may take `timeout` seconds. `mark` gets the number of each call before the call. With
    `keep_errors`, the error of a call is its result; otherwise the first error is raised.
    """
    return watching(timeout, lambda watch: _all(watch, calls, keep_errors, mark))


def await_result(value: object) -> object:
    """Return a value, or the result of an awaitable; works inside an event loop too."""
    if not _is_awaitable(value):
        return value
    (result,) = _together([value], None)
    if isinstance(result, BaseException):
        raise result
    return result


def _all(
    watch: Watch, calls: Sequence[Call], keep_errors: bool, mark: Callable[[int], None] | None
) -> list[Any]:
    results: list[Any] = []
    try:
        for number, call in enumerate(calls):
            if mark is not None:
                mark(number)
            results.append(_one(watch, call, keep_errors))
        pending = [number for number, result in enumerate(results) if _is_awaitable(result)]
        if pending:
            awaited = partial(_together, [results[number] for number in pending], watch.limit)
            async_call = Call(calls[pending[0]].title, awaited, {})
            for number, result in zip(pending, watch.run(async_call, ASYNC_ALLOWANCE), strict=True):
                results[number] = result
                # By type(): a value may report another __class__, or raise.
                if issubclass(type(result), TimedOut):
                    raise watch.too_long(calls[number])
                if issubclass(type(result), BaseException):
                    results[number] = _failed(calls[number], result, keep_errors)
            watch.check(async_call)
    finally:
        for result in results:
            # By type(): a value may report another __class__, or raise.
            if issubclass(type(result), CoroutineType):
                result.close()  # not awaited, because an earlier call raised
    return results


def _is_awaitable(result: object) -> TypeGuard[Awaitable[Any]]:
    if type(result) in _NUMBERS:
        return False
    try:
        return inspect.isawaitable(result)
    except KeyboardInterrupt:
        raise
    except BaseException:  # its __class__ raises; the check of the result names it
        return False


def _one(watch: Watch, call: Call, keep_errors: bool) -> object:
    try:
        return watch.run(call)
    except (RewardAbortError, KeyboardInterrupt):
        raise
    except BaseException as error:  # user code may raise anything, SystemExit included
        return _failed(call, error, keep_errors)


def _failed(call: Call, error: BaseException, keep_errors: bool) -> RewardError:
    where = _place(error)
    reward_error = RewardError(f"{call.title()}: it raised {error_text(error)}{where}{hint(error)}")
    if not keep_errors:
        raise reward_error from error
    return reward_error


def _place(error: BaseException) -> str:
    """Return file, line and function of the user's code that raised an exception, or "".

    It is the innermost call outside this package and all installed packages.
    """
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not frame.filename.startswith((*_NOT_YOURS, "<frozen"))]
    if not of_user:
        return ""
    file = Path(of_user[-1].filename)
    with suppress(ValueError, OSError):  # it lies elsewhere, or the working folder is gone
        file = file.relative_to(Path.cwd())
    names = [frame.name for frame in of_user if not frame.name.startswith("<")]  # no comprehension
    return f" in {file}, line {of_user[-1].lineno}, {(names or ['a lambda'])[-1]}"


def _together(awaitables: Sequence[Awaitable[Any]], limit: float | None) -> list[Any]:
    """Return each awaitable's result, or the exception that it raised; `TimedOut` if late."""
    # Imported here because it loads slowly and most reward functions are not async.
    import asyncio

    # Kept out of the tasks' results: asyncio formats those when it compares signal handlers, and
    # the __repr__ of a value may raise.
    outcomes: list[Any] = [TimedOut() for _ in awaitables]
    results: list[Any] = []

    async def keep(number: int, awaitable: Awaitable[object]) -> None:
        try:
            outcomes[number] = await awaitable
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # kept until the other calls have ended
            outcomes[number] = error

    async def together() -> None:
        tasks = [asyncio.ensure_future(keep(*pair)) for pair in enumerate(awaitables)]
        try:
            # All begin at once, so one time-out serves all.
            await asyncio.wait(tasks, timeout=limit)
            results.extend(outcomes)  # now: `asyncio.run` then cancels those that are late
        finally:
            for task in tasks:  # asyncio would log a KeyboardInterrupt left in one
                if task.done() and not task.cancelled():
                    task.exception()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(together())
    else:
        in_a_thread("async", lambda: asyncio.run(together())).result()
    return results
