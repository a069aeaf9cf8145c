"""What the processes of a run tell each other; alone, a process talks to nobody.

A round needs few words: scores and records are gathered, the plan of the next round comes from the
first rank, and a child whose parent lives elsewhere gets its weights sent. Everything else, random
draws included, follows on each rank from what all of them know.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from evo_grpo.population.ranks.lockstep import Lockstep

T = TypeVar("T")


def announced() -> bool:
    """Return whether this process was started as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def follows() -> bool:
    """Return whether this process is a rank that shows nothing: the first one shows the run."""
    return announced() and int(os.environ.get("RANK", "0")) > 0


class Team:
    """The ranks of a run: of this class the only process of one, of `Ranks` one of several.

    Attributes:
        rank: Number of this process, from 0 on.
        size: How many there are.
    """

    rank: int = 0
    size: int = 1

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Do a part of the work on every rank, and return all parts, pickled, by rank.

        Raises:
            OtherRankError: Another rank failed in its part, or died.
            BaseException: What `work` raised, on the ranks on which it did.
        """
        return [work()]

    def lead(self, work: Callable[[], T]) -> T:
        """Do work on the first rank alone, and return what it returned to all.

        Raises:
            OtherRankError: It failed there, or that rank died.
            BaseException: What `work` raised, on the first rank.
        """
        return work()

    def send(self, values: object, to: int) -> None:
        """Send what can be pickled, tensors on the CPU, to a rank, which has to `receive` it."""
        raise AssertionError(f"rank {to} is not the only one of this run")

    def receive(self, source: int) -> Any:  # noqa: ANN401 -- what was sent
        """Return what a rank sends."""
        raise AssertionError(f"rank {source} is not the only one of this run")

    def in_lockstep(
        self, join_forward: Callable[[], None], join_backward: Callable[[], None]
    ) -> Lockstep:
        """Return what every pass of this rank goes through from now on; all ranks call it alike.

        A rank without work takes part in the passes of others wherever the ranks meet, so passes
        belong into the work that `gather` and `lead` are given. `join_forward` and `join_backward`
        take part in a pass of other ranks without computing anything.
        """
        return Lockstep(lambda number: number, join_forward, join_backward)

    def exchange(self) -> AbstractContextManager[None]:
        """Return a context in which something else exchanges tensors between all ranks.

        An error in the middle of it ends this rank, since the others wait for its tensors.
        """
        return nullcontext()


def on_all(team: Team, work: Callable[[], T]) -> T:
    """Do something on every rank, and return what it came to on this one once all have done it.

    Raises:
        OtherRankError: Another rank failed, or died.
        BaseException: What `work` raised, on the ranks on which it did.
    """
    done: list[T] = []
    team.gather(lambda: done.append(work()))
    return done[0]


def on_first_only(team: Team, work: Callable[[], T]) -> T | None:
    """Do something on the first rank; return what it came to there, and None on the others.

    Unlike `Team.lead` it sends nothing, so what work returns need not be pickled.
    """
    return on_all(team, lambda: work() if team.rank == 0 else None)
