"""Calls of user functions: sync one by one, async all at once, errors with their place."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from evo_grpo.envs.rewards.watch import Call, ExitedError, TimedOut, Watch, in_a_thread, watching
from evo_grpo.errors import RewardAbortError, RewardError
from evo_grpo.printable import raised

if TYPE_CHECKING:
    from asyncio import Task

#: What most functions return; to ask whether it is awaitable takes longer than to compute it.
_NUMBERS = frozenset({float, int, bool, type(None)})

ASYNC_ALLOWANCE = 1.0
"""Seconds beyond the limit until calls that run together are interrupted as a whole."""


@dataclass(frozen=True)
class Raised:
    """In place of a result: what a call raised, named with function, row and prompt."""

    named: RewardError


def run_calls(
    calls: Sequence[Call],
    timeout: float | None,
    mark: Callable[[int], None] | None,
    *,
    keep_errors: bool,
) -> list[Any]:
    """Make all calls and wait for the async ones together.

    Works inside a running event loop too (a notebook): then the async calls run in a loop of
    another thread.

    Args:
        calls: What is called.
        timeout: Seconds that each may take; None is no limit.
        mark: Told the number of each call before it is made.
        keep_errors: Return `Raised` in place of a result and go on, instead of raising the first in
            order.

    Raises:
        RewardError: A call raised, which is the cause.
        RewardAbortError: A call took too long, would have ended the process, or left the working
            folder or one of torch's modes changed.
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
            awaited = partial(_together, awaitables, watch.limit)
            together = Call(calls[waiting[0]].title, awaited, {})
            settled = watch.run(together, ASYNC_ALLOWANCE)
            for number, result in zip(waiting, settled, strict=True):
                results[number] = _settled(watch, calls[number], result, keep_errors)
            watch.check(together)
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
        return watch.run(call)
    except (RewardAbortError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's code may raise anything, sys.exit() included
        return _failed(call, error, keep_errors)


def _settled(watch: Watch, call: Call, result: object, keep_errors: bool) -> object:
    # By its type: a value may say anything of its own class, or raise.
    if issubclass(type(result), TimedOut):
        raise watch.too_long(call)
    if issubclass(type(result), ExitedError):
        raise watch.exited(call)
    if issubclass(type(result), BaseException):
        return _failed(call, cast("BaseException", result), keep_errors)
    return result


def _failed(call: Call, error: BaseException, keep_errors: bool) -> Raised:
    named = RewardError(f"{call.title()}: it raised {raised(error)}")
    if not keep_errors:
        raise named from error
    return Raised(named)


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
        in_a_thread("async", lambda: asyncio.run(together())).result()
    return found


def _ask_for_exceptions(tasks: Sequence[Task[None]]) -> None:
    """Look at Ctrl-C, which goes its own way; else asyncio logs it too."""
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()
