"""The protocol of a selection, and the type of its result."""

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
        position: The position that it takes.
        parent: Position of the agent it comes from; equal to `position` for a survivor.
        elite: Whether it is the best agent, which stays independently of all draws.
    """

    position: Position
    parent: Position
    elite: bool = False


class Selector(Protocol):
    """Plans the next round from the fitness of this one.

    A class may also declare `copies = False` if it copies no agent, `selects = False` if all stay,
    `by_lot = True` if it draws; a field `size` is the number of agents of a tournament.

    A plan refers to agents by their positions in this round, 0 to len(histories) - 1. Parents must
    survive at their positions, so that copies can be made in any order. An agent whose position no
    offspring takes leaves the population.
    """

    def plan(
        self, histories: Sequence[Sequence[Score]], places: int, rng: np.random.Generator
    ) -> tuple[Offspring, ...]:
        """Return the agents of the next round, in ascending order of position.

        Args:
            histories: Per position the scores that count, latest last; empty for a failed agent.
            places: Agents that the next round has room for, 1 to len(histories). A plan may leave
                places empty.
            rng: Stream of all draws: equal streams give equal plans.

        Raises:
            RunFailedError: Every agent has failed.
        """
        ...
