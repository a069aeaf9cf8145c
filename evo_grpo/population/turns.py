"""Parts of the population take turns: while one waits for its rewards, others compute.

What a part does is a generator, which yields the work that needs no device, such as a call of the
reward functions, and goes on with the result. Parts go on in a fixed cycle, however long each
takes, so they compute the same in the same order as if each waited for its own rewards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from threading import Event
from typing import Any, ParamSpec, TypeVar

from evo_grpo.envs.protocol import Ask, Environment, Experience, Play
from evo_grpo.envs.rewards.watch import in_a_thread
from evo_grpo.errors import ConfigError
from evo_grpo.settings import EngineConfig
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
    cycle, stop = deque(range(len(parts))), Event()
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
            under_way[number] = work, in_a_thread("rewards", work.do, stop)
            cycle.append(number)
    finally:
        stop.set()  # after an error or Ctrl-C, no further function is called
        for part in parts:
            part.close()
    return [found[number] for number in range(len(parts))]


def check_overlap(engine: EngineConfig, env: Environment[Any]) -> bool:
    """Return whether the parts of a population take turns.

    Raises:
        ConfigError: They should, but plays of this environment must not go on side by side, as
            those of games, which share their environments.
    """
    if engine.overlap is None:
        return False
    if not getattr(env, "side_by_side", False):
        raise ConfigError(
            f"engine.overlap: expected an environment of one turn, whose rewards may be computed "
            f"while other agents generate, got {env.name!r}; leave engine.overlap out, or give an "
            "environment of your own the attribute side_by_side = True if several of its plays "
            "may go on at once, in threads"
        )
    return True


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
