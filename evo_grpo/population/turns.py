"""Parts of the population take turns: while one waits for its rewards, others compute.

What a part does is a generator, which yields the work that needs no device, such as a call of the
reward functions, and goes on with the result. Parts go on in a fixed cycle, however long each
takes, so they compute the same in the same order as if each waited for its own rewards.
"""

from __future__ import annotations

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

AUTO_SHARES = 1 / 3, 1.0
"""Least seconds of rewards over those of generate and learn for which `auto` takes 2, and 4 parts.

With 8 agents on a CPU, two parts compute for 1.14 to 1.23 times as long as all agents at once, and
four for 1.41 to 1.57 times (experiments/bench/overlap.py).
"""

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


def began(
    env: Environment[Any],
    begin: Callable[[], Play],
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Turns[Play]:
    """Begin a play; where its environments are reset, as those of games, this is work too."""
    if hasattr(env, "max_turns"):
        return (yield HostWork(begin, waiting))
    with waiting():
        return begin()


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


@final
class Overlap:
    """How many parts the agents of a shard are dealt into; see `engine.overlap`.

    Args:
        setting: The setting; `auto` is one part until `settle` decides.
        shards: Number of shards.

    Attributes:
        parts: Parts of a shard, >= 1.
    """

    def __init__(self, setting: int | Literal["auto"] | None, shards: int = 1) -> None:
        self._setting = setting
        self._shards = shards
        self._decided: int | None = None
        self.parts = setting if isinstance(setting, int) else 1

    def takes_turns(self, env: Environment[Any]) -> bool:
        """Return whether the parts take turns in an environment; sets `parts`.

        Raises:
            ConfigError: They should, but plays of this environment must not go on side by side,
                or it has fewer environments than parts.
        """
        gym = env if isinstance(env, MultiTurnGym) else None
        most = None if gym is None else gym.max_environments
        if self._setting == "auto":
            room = 1 if not _side_by_side(env) else 64 if most is None else most // self._shards
            self.parts = max(1, min(self._decided or 1, room))
        elif self._setting is not None and not _side_by_side(env):
            raise ConfigError(
                f"engine.overlap: expected an environment of which several plays may go on at "
                f"once, in threads, got {env.name!r}, which has no side_by_side = True; leave "
                "engine.overlap out, or give your own environment this attribute; a game takes "
                "part as a MultiTurnGym that makes its environments"
            )
        if gym is not None:
            gym.divide(self._shards * self.parts if self.parts > 1 else 1)
        return self.parts > 1

    def settle(self, seconds: Mapping[str, float], env: Environment[Any] | None = None) -> str:
        """Decide `auto`, once, by the seconds of a round in which all agents waited for rewards.

        Args:
            seconds: Phase -> seconds of the round.
            env: Its environment; nothing is decided by one that parts cannot share. None if it is
                not known, as in a population that was saved.

        Returns:
            A sentence about the decision; empty where there is none to make.
        """
        left = env is not None and not _side_by_side(env)
        if self._setting != "auto" or self._decided is not None or left:
            return ""
        rewards = seconds.get("reward", 0.0)
        computing = seconds.get("generate", 0.0) + seconds.get("learn", 0.0)
        few, many = AUTO_SHARES
        share = rewards / computing if computing else 0.0
        self._decided = parts = 1 if share < few else 2 if share < many else 4
        how = f"{parts} parts take turns" if parts > 1 else "all agents are computed at once"
        return (
            f"engine.overlap auto: rewards took {rewards:.3g} s in the first round, generate and "
            f"learn {computing:.3g} s: {how} from the next round on"
        )


def _side_by_side(env: Environment[Any]) -> bool:
    return bool(getattr(env, "side_by_side", False))


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
