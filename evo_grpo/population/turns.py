"""Runs parts of the population in turns: while one waits for rewards, others compute.

A part is a generator. It yields work that needs no device, such as a call of the reward functions,
and continues with the result. Parts continue in a fixed cycle, whatever their durations, so the
computations of a part have the same order and results as without turns.
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from threading import Event
from typing import Any, Literal, ParamSpec, TypeVar, final

from evo_grpo.envs.episodes.gym import MultiTurnGym
from evo_grpo.envs.protocol import Ask, Environment, Experience, Play
from evo_grpo.envs.rewards.watch import in_a_thread
from evo_grpo.errors import ConfigError
from evo_grpo.types import CompletionGroup

AUTO_SHARE = 0.1
"""With `overlap: auto`, parts take turns if rewards take at least this share of computing time.

Computing time is the time of generate and learn. Taking turns costs up to 9%
(experiments/bench/overlap.py).
"""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class HostWork:
    """Work that needs no device; `do` can be called in any thread.

    `waiting` opens a context for the time that the part waits.
    """

    do: Callable[[], Any]
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext


Turns = Generator[HostWork, Any, T]


def played(
    env: Environment[Any],
    begin: Callable[[], Play],
    sample: Callable[[Ask], list[list[CompletionGroup]]],
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Turns[list[Experience]]:
    """Run a play to its end, and return its experiences; the work of environments is `HostWork`.

    `begin` starts the play, which is `HostWork` too if it resets environments such as games.
    `waiting` opens a context while environments work.
    """
    if hasattr(env, "max_turns"):
        play = yield HostWork(begin, waiting)
    else:
        with waiting():
            play = begin()

    def told(groups: list[list[CompletionGroup]]) -> tuple[Ask | None, list[Experience]]:
        play.tell(groups)
        ask = play.ask()
        return ask, play.experiences() if ask is None else []

    ask, experiences = play.ask(), None
    while ask is not None:
        ask, experiences = yield HostWork(partial(told, sample(ask)), waiting)
    return (yield HostWork(play.experiences, waiting)) if experiences is None else experiences


def take_turns(parts: Sequence[Turns[T]], *, overlap: bool) -> list[T]:
    """Run parts one after the other, or with `overlap` in turns; return the result of each part.

    In turns, the host work of each part runs in its own thread. An error of a part ends all parts.
    """
    if not overlap or len(parts) == 1:
        return [run_part(part) for part in parts]
    results: dict[int, T] = {}
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
                results[number] = end.value
                continue
            under_way[number] = work, in_a_thread("rewards", work.do, stop)
            cycle.append(number)
    finally:
        stop.set()  # after an error or Ctrl-C, no further function is called
        for part in parts:
            part.close()
    return [results[number] for number in range(len(parts))]


@final
class Overlap:
    """Decides whether parts of a population, `parts` in number, take turns (`engine.overlap`)."""

    def __init__(self, setting: bool | Literal["auto"], parts: int) -> None:
        self._setting = setting
        self._parts = parts
        self._decided: bool | None = None

    def takes_turns(self, env: Environment[Any]) -> bool:
        """Return whether the parts of this process take turns in an environment."""
        able = self._able(env)
        if self._setting is True and not able and self._parts > 1:
            why = (
                "too few max_environments; raise them, lower engine.shards,"
                if getattr(env, "side_by_side", False)
                else "no side_by_side = True; give your own environment this attribute, make a "
                "game a MultiTurnGym that makes its environments,"
            )
            raise ConfigError(
                f"engine.overlap: expected an environment of which {self._parts} plays, one for "
                f"each of engine.shards, may go on at once, in threads, got {env.name!r}, which "
                f"has {why} or leave engine.overlap out"
            )
        if isinstance(env, MultiTurnGym):
            # Batches stay equal, whatever the number of parts here and the decision of `auto`.
            env.plays = self._parts if self._setting and able else 1
        return able and (self._setting is True or self._decided is True)

    def decide_after(self, seconds: Mapping[str, float], env: Environment[Any]) -> str:
        """With setting "auto", decide once whether parts take turns from the next round on.

        `seconds` has the time of each phase of a round without turns. Returns a sentence about the
        decision, "" if none is made.
        """
        undecided = self._setting == "auto" and self._decided is None and self._parts > 1
        if not (undecided and self._able(env)):
            return ""
        rewards = seconds.get("reward", 0.0)
        computing = seconds.get("generate", 0.0) + seconds.get("learn", 0.0)
        self._decided = rewards >= AUTO_SHARE * computing
        how = "take turns from the next round on" if self._decided else "wait for their rewards"
        return (
            f"engine.overlap auto: rewards took {rewards:.3g} s, generate and learn "
            f"{computing:.3g} s: {self._parts} parts {how}"
        )

    def _able(self, env: Environment[Any]) -> bool:
        """Return whether plays of all parts may run at the same time."""
        most = env.max_environments if isinstance(env, MultiTurnGym) else None
        return bool(getattr(env, "side_by_side", False)) and (most is None or most >= self._parts)


def run_part(part: Turns[T]) -> T:
    """Run one part and its work in this thread; return the part's result."""
    result = None
    while True:
        try:
            work = part.send(result)
        except StopIteration as end:
            return end.value
        with work.waiting():
            result = work.do()


def alone(turns: Callable[P, Turns[T]]) -> Callable[P, T]:
    """Wrap the generator function of a part into a function that runs the part to its end."""

    @wraps(turns)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_part(turns(*args, **kwargs))

    return run
