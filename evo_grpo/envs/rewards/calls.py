"""Calls of user functions: sync one by one, async all at once, errors with their place."""

from __future__ import annotations

import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

from evo_grpo.envs.rewards.watch import TimedOut, Watch, watching
from evo_grpo.errors import RewardAbortError, RewardError
from evo_grpo.printable import raised

if TYPE_CHECKING:
    from asyncio import Task

#: What most functions return; to ask whether it is awaitable takes longer than to compute it.
_NUMBERS = frozenset({float, int, bool, type(None)})

ASYNC_ALLOWANCE = 1.0
"""Seconds beyond the limit until calls that run together are interrupted as a whole."""


class Call(NamedTuple):
    """One call of a reward function.

    Attributes:
        name: The function's name, for messages.
        fn: The function, sync or async.
        arguments: What it is called with, by name.
        place: Returns row and prompt, for messages.
    """

    name: str
    fn: Callable[..., Any]
    arguments: Mapping[str, Any]
    place: Callable[[], str]

    def title(self) -> str:
        """Name function, row and prompt."""
        return f"reward function {self.name!r}, {self.place()}"

    def failed(self, error: BaseException) -> RewardError:
        """Name function, row and prompt of an exception."""
        return RewardError(f"{self.title()}: it raised {raised(error)}")


@dataclass(frozen=True)
class Raised:
    """In place of a result: what a call raised.

    Attributes:
        error: The exception.
        named: The same with function, row and prompt.
    """

    error: BaseException
    named: RewardError


def run_calls(
    calls: Sequence[Call],
    *,
    timeout: float | None = None,
    keep_errors: bool = False,
    mark: Callable[[int], None] | None = None,
) -> list[Any]:
    """Make all calls and wait for the async ones together.

    Works inside a running event loop too (a notebook): then the async calls run in a loop of
    another thread.

    Args:
        calls: The calls.
        timeout: Seconds that each may take; None is no limit.
        keep_errors: Return `Raised` in place of a result and go on, instead of raising.
        mark: Told the number of each call before it is made.

    Returns:
        The results, in the order of the calls.

    Raises:
        RewardError: A call raised; the first in order is named, with the exception as its cause.
        RewardAbortError: A call took too long, or left gradients off.
    """
    return watching(timeout, lambda watch: _all(watch, calls, keep_errors, mark))


def settle(value: object) -> object:
    """Return a value, or what it yields where it is awaitable; works inside an event loop too."""
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
        waiting = [number for number, result in enumerate(results) if _is_awaitable(result)]
        if waiting:
            awaitables = [results[number] for number in waiting]
            first = calls[waiting[0]]
            settled = watch.run(
                first,
                _together,
                {"awaitables": awaitables, "limit": watch.limit},
                ASYNC_ALLOWANCE,
            )
            for number, result in zip(waiting, settled, strict=True):
                results[number] = _settled(watch, calls[number], result, keep_errors)
            watch.check(first)
    finally:
        for result in results:
            # By its type: a value may say anything of its own class, or raise.
            if issubclass(type(result), CoroutineType):
                result.close()  # an earlier call raised, so it will never be awaited
    return results


def _is_awaitable(result: object) -> TypeGuard[Awaitable[Any]]:
    if type(result) in _NUMBERS:
        return False
    try:
        return inspect.isawaitable(result)
    except KeyboardInterrupt:
        raise
    except BaseException:  # its own __class__ raises; whoever reads the result says so
        return False


def _one(watch: Watch, call: Call, keep_errors: bool) -> object:
    try:
        return watch.run(call, call.fn, call.arguments)
    except (RewardAbortError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's code may raise anything, sys.exit() included
        named = call.failed(error)
        if not keep_errors:
            raise named from error
        return Raised(error, named)


def _settled(watch: Watch, call: Call, result: object, keep_errors: bool) -> object:
    # By its type: a value may say anything of its own class, or raise.
    if issubclass(type(result), TimedOut):
        raise watch.too_long(call)
    if not issubclass(type(result), BaseException):
        return result
    error = cast("BaseException", result)
    named = call.failed(error)
    if not keep_errors:
        raise named from error
    return Raised(error, named)


def _together(awaitables: Sequence[Awaitable[Any]], limit: float | None) -> list[Any]:
    """Await all; an exception stands in place of its result, `TimedOut` for one that is late."""
    # Imported here: slow to load, and most reward functions are not async.
    import asyncio

    # In a list of ours, and not as the results of tasks: to compare signal handlers asyncio shows
    # those, and a value's own __repr__ may raise.
    outcomes: list[Any] = [TimedOut() for _ in awaitables]
    found: list[Any] = []

    async def settled(number: int, awaitable: Awaitable[object]) -> None:
        try:
            outcomes[number] = await awaitable
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # kept until the other calls have ended
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # Ctrl-C or the limit, and no cancellation of the function's own
            outcomes[number] = error

    async def together() -> None:
        tasks = [asyncio.ensure_future(settled(*pair)) for pair in enumerate(awaitables)]
        try:
            # All begin at once, so that one clock serves them all.
            await asyncio.wait(tasks, timeout=limit)
        finally:
            _ask_for_exceptions(tasks)
        for number, task in enumerate(tasks):
            if task.cancelled():  # by itself
                outcomes[number] = asyncio.CancelledError()
            task.cancel()
        found.extend(outcomes)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(together())
    else:
        _in_a_thread(lambda: asyncio.run(together()))
    return found


def _ask_for_exceptions(tasks: Sequence[Task[None]]) -> None:
    """Look at Ctrl-C, which goes its own way; else asyncio logs it too."""
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()


def _in_a_thread(work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def helper() -> None:
        try:
            work()
        except BaseException as error:  # raised again below, in the thread that asked
            errors.append(error)

    # A daemon, and no pool: a call that hangs in it must not hold up the end of the process.
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(helper,), name="async", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
