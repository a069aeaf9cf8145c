"""What a selection returns, and how it is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from evo_grpo.types import Position, Score


@dataclass(frozen=True)
class Offspring:
    """One agent of the next round.

    Attributes:
        position: The position that it fills.
        parent: Position of the agent it comes from; equal to `position` for a survivor, which stays
            in place.
        elite: Whether it is the best agent, kept whatever the draws said.
    """

    position: Position
    parent: Position
    elite: bool = False


class Selector(Protocol):
    """Plans the next round from the fitness of this one.

    A plan refers to agents by their positions in this round, 0 to len(histories) - 1. Parents
    survive in place, so a plan can be carried out in any order and without a temporary copy: no
    parent is overwritten before its child is copied from it. An agent whose position no offspring
    fills leaves the population.
    """

    def plan(
        self, histories: Sequence[Sequence[Score]], places: int, rng: np.random.Generator
    ) -> tuple[Offspring, ...]:
        """Return the agents of the next round, by rising position.

        Args:
            histories: Per position the scores that count, latest last; empty for a failed agent.
            places: Agents that the next round has room for, 1 to len(histories). A plan may leave
                places empty.
            rng: The stream of all draws: equal streams give equal plans.

        Raises:
            RunFailedError: When every agent has failed.
        """
        ...
