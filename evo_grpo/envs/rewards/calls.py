"""Calls of user functions: sync ones in turn, async ones together, errors with their place."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import CoroutineType
from typing import Any, TypeGuard

from evo_grpo.envs.rewards.functions import hint, place_in_code
from evo_grpo.envs.rewards.watch import Call, TimedOut, Watch, in_a_thread, watching
from evo_grpo.errors import RewardAbortError, RewardError
from evo_grpo.printable import error_text

#: Types of most results; checking whether one is awaitable takes longer than computing it.
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

    Works inside a running event loop, as in a notebook: the async calls then run in a loop in
    another thread.

    Args:
        calls: The calls.
        timeout: Seconds that each may take; None is no limit.
        mark: Called with the number of each call before the call.
        keep_errors: Return the error of a call that raises in place of its result, instead of
            raising the first one.

    Returns:
        The result of each call.
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
        waiting = [number for number, result in enumerate(results) if _is_awaitable(result)]
        if waiting:
            awaited = partial(_together, [results[number] for number in waiting], watch.limit)
            together = Call(calls[waiting[0]].title, awaited, {})
            for number, result in zip(waiting, watch.run(together, ASYNC_ALLOWANCE), strict=True):
                results[number] = result
                # By type(): a value may report another __class__, or raise.
                if issubclass(type(result), TimedOut):
                    raise watch.too_long(calls[number])
                if issubclass(type(result), BaseException):
                    results[number] = _failed(calls[number], result, keep_errors)
            watch.check(together)
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
    where = place_in_code(error)
    named = RewardError(f"{call.title()}: it raised {error_text(error)}{where}{hint(error)}")
    if not keep_errors:
        raise named from error
    return named


def _together(awaitables: Sequence[Awaitable[Any]], limit: float | None) -> list[Any]:
    """Return the results of awaitables; an exception for one that raised, `TimedOut` if late."""
    # Imported here because it loads slowly and most reward functions are not async.
    import asyncio

    # Kept out of the tasks' results: asyncio formats those when it compares signal handlers, and
    # the __repr__ of a value may raise.
    outcomes: list[Any] = [TimedOut() for _ in awaitables]
    found: list[Any] = []

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
            found.extend(outcomes)  # now: `asyncio.run` then cancels those that are late
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
    return found
