"""Parts of the population take turns: while one waits for its rewards, others compute.

What a part does is a generator, which yields the work that needs no device, such as a call of the
reward functions, and goes on with the result. Parts go on in a fixed cycle, whatever takes how
long, so they compute the same in the same order as if each waited for its own rewards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from evo_grpo.envs.protocol import Ask, Experience, Play
from evo_grpo.envs.rewards.watch import in_a_thread
from evo_grpo.types import CompletionGroup

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class HostWork:
    """Work that needs no device.

    Attributes:
        do: Does it, in any thread.
        waiting: Opens a context for the time that the part waits for it.
    """

    do: Callable[[], Any]
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext


Turns = Generator[HostWork, Any, T]


def played(
    play: Play,
    sample: Callable[[Ask], list[list[CompletionGroup]]],
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Turns[list[Experience]]:
    """Play a play that has begun; `waiting` opens a context for the time of its environments."""

    def told(groups: list[list[CompletionGroup]]) -> tuple[Ask | None, list[Experience]]:
        play.tell(groups)
        ask = play.ask()
        return ask, play.experiences() if ask is None else []

    ask, experiences = play.ask(), None
    while ask is not None:
        ask, experiences = yield HostWork(partial(told, sample(ask)), waiting)
    return (yield HostWork(play.experiences, waiting)) if experiences is None else experiences


def take_turns(parts: Sequence[Turns[T]], *, overlap: bool) -> list[T]:
    """Run parts to their ends, one after the other, or with `overlap` in turns.

    In turns, the work of each is done in a thread of its own. An error of a part, or of its work,
    ends all of them.

    Returns:
        What each part returns.
    """
    if not overlap or len(parts) == 1:
        return [to_the_end(part) for part in parts]
    found: dict[int, T] = {}
    under_way: dict[int, tuple[HostWork, Future[Any]]] = {}
    cycle = deque(range(len(parts)))
    try:
        while cycle:
            number = cycle.popleft()
            result = None
            if number in under_way:
                work, future = under_way.pop(number)
                with work.waiting():
                    result = future.result()
            try:
                work = parts[number].send(result)
            except StopIteration as end:
                found[number] = end.value
                continue
            under_way[number] = work, in_a_thread("rewards", work.do)
            cycle.append(number)
    finally:
        for part in parts:
            part.close()
    return [found[number] for number in range(len(parts))]


def to_the_end(part: Turns[T]) -> T:
    """Run one part to its end, and its work in this thread; return what the part returns."""
    result = None
    while True:
        try:
            work = part.send(result)
        except StopIteration as end:
            return end.value
        with work.waiting():
            result = work.do()


def alone(turns: Callable[P, Turns[T]]) -> Callable[P, T]:
    """Return the function that runs such a part to its end."""

    @wraps(turns)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return to_the_end(turns(*args, **kwargs))

    return run
