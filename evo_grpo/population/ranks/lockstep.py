"""Coordinates passes over a divided base, so that all ranks take part in every pass.

A divided base is assembled layer by layer in every pass, which requires all ranks. Ranks have
different numbers of passes, because completions differ in length and rows in number, and a single
rank may evaluate alone. So before a pass the ranks agree on its kind. Ranks that requested this
kind compute; the others only provide their part of the base.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from typing import final

from evo_grpo.errors import RunFailedError


class Pass(IntEnum):
    """The kinds of passes; if ranks request different kinds, the higher one runs first.

    So a rank with many forwards then joins the others in the costly backward.
    """

    BACKWARD = 1
    FORWARD = 2


#: Sent by a rank that requests no pass.
IDLE = 0


@final
class Lockstep:
    """Runs the passes of one rank in lockstep with those of the other ranks.

    Args:
        highest: Sends a number to all ranks, and returns the highest number of all ranks.
        join_forward: Takes part in a forward of other ranks without computing anything.
        join_backward: The same for a backward.

    Attributes:
        broken: Whether this rank left in the middle of a pass, after which no exchange is possible.
    """

    def __init__(
        self,
        highest: Callable[[int], int],
        join_forward: Callable[[], None],
        join_backward: Callable[[], None],
    ) -> None:
        self._highest = highest
        self._join = {Pass.FORWARD: join_forward, Pass.BACKWARD: join_backward}
        self.broken = False

    def forward(self) -> AbstractContextManager[None]:
        """Take part in passes of other ranks until a forward is due, which the context runs."""
        return self._pass(Pass.FORWARD)

    def backward(self) -> AbstractContextManager[None]:
        """Take part in passes of other ranks until a backward is due, which the context runs."""
        return self._pass(Pass.BACKWARD)

    def idle(self) -> None:
        """Take part in the passes of other ranks until none requests one."""
        with self._pass(IDLE):
            pass

    @contextmanager
    def _pass(self, wanted: int) -> Generator[None]:
        """Record an error in the middle of a pass: the others wait for this rank's part."""
        if self.broken:
            raise RunFailedError(
                "engine.base: expected every pass over the sharded base to be finished by all "
                "ranks, got an error in the middle of one; continue with: evo-grpo resume RUN"
            )
        self.broken = True
        while (coming := self._highest(wanted)) != wanted:
            self._join[Pass(coming)]()
        yield
        self.broken = False
