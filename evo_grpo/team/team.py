"""What the processes of a run tell each other; alone, a process talks to nobody.

A round needs few words: scores and records are gathered, the plan of the next round comes from the
first rank, and a child whose parent lives elsewhere gets its weights sent. Everything else, random
draws included, follows on each rank from what all of them know.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar, final

from evo_grpo.errors import RunFailedError
from evo_grpo.team.lockstep import Lockstep

T = TypeVar("T")


class Team(Protocol):
    """The ranks of a run.

    Attributes:
        rank: Number of this process, from 0 on.
        size: How many there are.
    """

    rank: int
    size: int

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Do a part of the work on every rank, and return all parts by rank.

        Args:
            work: Of this rank; what it returns is pickled.

        Raises:
            OtherRankError: Another rank failed in its part, or died.
            BaseException: What `work` raised, on the ranks on which it did.
        """
        ...

    def lead(self, work: Callable[[], T]) -> T:
        """Do work on the first rank alone, and return what it returned to all.

        Raises:
            OtherRankError: It failed there, or that rank died.
            BaseException: What `work` raised, on the first rank.
        """
        ...

    def send(self, tensors: dict[str, Any], to: int) -> None:
        """Send named tensors to a rank, which has to `receive` them."""
        ...

    def receive(self, source: int) -> dict[str, Any]:
        """Return the tensors that a rank sends, on the CPU."""
        ...

    def in_lockstep(
        self, join_forward: Callable[[], None], join_backward: Callable[[], None]
    ) -> Lockstep:
        """Return what every pass of this rank goes through from now on; all ranks call it alike.

        A rank without work takes part in the passes of others wherever the ranks meet, so passes
        belong into the work that `gather` and `lead` are given.

        Args:
            join_forward: Takes part in a forward of other ranks without computing anything.
            join_backward: The same for a backward.
        """
        ...

    def exchange(self) -> AbstractContextManager[None]:
        """Return a context in which something else exchanges tensors between all ranks.

        An error in the middle of it ends this rank, since the others wait for its tensors.
        """
        ...


@final
class Alone:
    """The only process of a run."""

    rank = 0
    size = 1

    def gather(self, work: Callable[[], T]) -> list[T]:
        """See `Team`."""
        return [work()]

    def lead(self, work: Callable[[], T]) -> T:
        """See `Team`."""
        return work()

    def send(self, tensors: dict[str, Any], to: int) -> None:
        """Refuse: there is nobody else."""
        del tensors
        raise RunFailedError(f"rank {to}: expected 0, the only rank of this run; start it anew")

    def receive(self, source: int) -> dict[str, Any]:
        """Refuse: there is nobody else."""
        raise RunFailedError(f"rank {source}: expected 0, the only rank of this run; start it anew")

    def in_lockstep(
        self, join_forward: Callable[[], None], join_backward: Callable[[], None]
    ) -> Lockstep:
        """See `Team`: there are no passes of others."""
        return Lockstep(lambda number: number, join_forward, join_backward)

    def exchange(self) -> AbstractContextManager[None]:
        """See `Team`: there is nobody who waits."""
        return nullcontext()
