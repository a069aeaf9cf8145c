"""Truncation selection: copies of the best agents replace the worst ones."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, final

from evo_grpo.evolve.protocols import Offspring, rank
from evo_grpo.schema.group import Group, setting
from evo_grpo.types import Position, Score

if TYPE_CHECKING:
    import numpy as np


@final
class TruncationSelection(Group):
    """Copies of the best agents, drawn at random, replace the worst agents; the others stay.

    This is the selection of population-based training (Jaderberg et al. 2017, arXiv:1711.09846).
    All failed agents are replaced too. With fewer places than agents, the worst leave instead of
    being replaced.
    """

    kind: Literal["truncation"] = setting(
        "truncation", "The worst `share` of the agents copy agents of the best `share`."
    )
    share: float = setting(
        0.25, "Share of the agents that is replaced, and share that is copied.", gt=0, le=0.5
    )

    def plan(
        self, histories: Sequence[Sequence[Score]], places: int, rng: "np.random.Generator"
    ) -> tuple[Offspring, ...]:
        """Plan the next round; see `Selector`."""
        ranking = rank(histories)
        count = max(1, int(self.share * len(histories)))
        failed = len(histories) - len(ranking)
        # An agent never copies itself, so a single agent replaces no other.
        replaced = max(0, min(count - failed, len(ranking) - 1))
        survivors = ranking[: min(places, len(ranking) - replaced)]
        best = survivors[:count]
        parents = {position: position for position in survivors}
        vacant = [p for p in map(Position, range(len(histories))) if p not in parents]
        for position in vacant[: places - len(survivors)]:
            parents[position] = best[int(rng.integers(len(best)))]
        return tuple(
            Offspring(position, parents[position], position == ranking[0])
            for position in sorted(parents)
        )
