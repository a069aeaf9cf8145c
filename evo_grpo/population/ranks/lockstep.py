"""Passes over a base that is divided among ranks: all ranks take part in each of them.

A base that is divided among ranks is put together layer by layer in every pass, which no rank can
do without the others. Ranks have unequally many passes, since their completions differ in length,
their rows in number, and one of them may be alone in an evaluation. So before a pass the ranks
agree on which one comes next. Ranks that want it compute; the others only provide their part.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import IntEnum
from typing import final

from evo_grpo.errors import RunFailedError


class Pass(IntEnum):
    """The kinds of passes; of two that are wanted, the higher one comes first.

    A forward goes before a backward: a rank with many forwards then meets the others in their
    backward, which costs the most.
    """

    BACKWARD = 1
    FORWARD = 2


#: A rank that wants no pass.
IDLE = 0


@final
class Lockstep:
    """The passes of one rank, in step with those of the others.

    Args:
        highest: Sends a number to all ranks, and returns the highest number of all.
        join_forward: Takes part in a forward of other ranks without computing anything.
        join_backward: The same for a backward.
    """

    def __init__(
        self,
        highest: Callable[[int], int],
        join_forward: Callable[[], None],
        join_backward: Callable[[], None],
    ) -> None:
        self._highest = highest
        self._join = {Pass.FORWARD: join_forward, Pass.BACKWARD: join_backward}
        self._whole = True

    @property
    def broken(self) -> bool:
        """Whether this rank left in the middle of a pass, after which no exchange is possible."""
        return not self._whole

    @contextmanager
    def forward(self) -> Generator[None]:
        """Take part in passes of other ranks until a forward comes, which runs in the context."""
        with self._unbroken():
            self._until(Pass.FORWARD)
            yield

    @contextmanager
    def backward(self) -> Generator[None]:
        """Take part in passes of other ranks until a backward comes, which runs in the context."""
        with self._unbroken():
            self._until(Pass.BACKWARD)
            yield

    def idle(self) -> None:
        """Take part in the passes of other ranks until none of them wants one."""
        with self._unbroken():
            self._until(IDLE)

    def _until(self, wanted: int) -> None:
        while (coming := self._highest(wanted)) != wanted:
            self._join[Pass(coming)]()

    @contextmanager
    def _unbroken(self) -> Generator[None]:
        """Remember an error in the middle of a pass: the others wait for this rank's part."""
        if self.broken:
            raise RunFailedError(
                "engine.base: expected every pass over the sharded base to be finished by all "
                "ranks, got an error in the middle of one; continue with: evo-grpo resume RUN"
            )
        self._whole = False
        yield
        self._whole = True
