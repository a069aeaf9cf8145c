"""Calls of user functions: sync one by one, async all at once, errors with their place."""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evo_grpo.errors import RewardError

#: A user function may raise anything; the error names its place. sys.exit() in a reward function
#: does not end the run with an exit code of its own.
_USER_ERRORS = (Exception, SystemExit)


@dataclass(frozen=True)
class Call:
    """One call of a reward function.

    Attributes:
        name: The function's name, for messages.
        fn: The function, sync or async.
        arguments: What it is called with, by name.
        place: Row and prompt, for messages.
    """

    name: str
    fn: Callable[..., Any]
    arguments: Mapping[str, Any]
    place: str

    def failed(self, error: BaseException) -> RewardError:
        """Name function, row and prompt of an exception."""
        return RewardError(
            f"reward function {self.name!r}, {self.place}: it raised {type(error).__name__}: "
            f"{error}"
        )


def run_calls(calls: Sequence[Call]) -> list[Any]:
    """Make all calls and wait for the async ones together.

    Works inside a running event loop too (a notebook): then the async calls run in a loop of
    another thread.

    Returns:
        The results, in the order of the calls.

    Raises:
        RewardError: A call raised; the first in order is named, with the exception as its cause.
    """
    results: list[Any] = []
    try:
        for call in calls:
            results.append(_call(call))  # noqa: PERF401 -- `finally` needs those before the one that raises
        waiting = [number for number, result in enumerate(results) if inspect.isawaitable(result)]
        if waiting:
            settled = _run([results[number] for number in waiting])
            for number, result in zip(waiting, settled, strict=True):
                results[number] = result
    finally:
        for result in results:
            if inspect.iscoroutine(result):
                result.close()  # an earlier call raised, so it will never be awaited
    for call, result in zip(calls, results, strict=True):
        if isinstance(result, _Raised):
            raise call.failed(result.error) from result.error
    return results


def settle(value: object) -> object:
    """Return a value, or what it yields where it is awaitable; works inside an event loop too."""
    if not inspect.isawaitable(value):
        return value
    (result,) = _run([value])
    if isinstance(result, _Raised):
        raise result.error
    return result


@dataclass(frozen=True)
class _Raised:
    error: BaseException


def _call(call: Call) -> object:
    try:
        return call.fn(**call.arguments)
    except _USER_ERRORS as error:
        raise call.failed(error) from error


def _run(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    # Imported here: slow to load, and most reward functions are not async.
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    async def settle(awaitable: Awaitable[object]) -> object:
        try:
            return await awaitable
        except _USER_ERRORS as error:  # kept until the other calls have ended
            return _Raised(error)

    async def together() -> list[Any]:
        return await asyncio.gather(*(settle(awaitable) for awaitable in awaitables))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(together())
    context = contextvars.copy_context()
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(context.run, lambda: asyncio.run(together())).result()
