"""Selections that copy no agent: in one, the best agents continue; in the other, all agents."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, final

from evo_grpo.evolve.protocols import Offspring, best, rank
from evo_grpo.schema.group import Group, setting
from evo_grpo.types import Score

if TYPE_CHECKING:
    import numpy as np


@final
class HalvingSelection(Group):
    """The best agents take the places of the next round; the others leave, and none is copied.

    This is successive halving (Jamieson & Talwalkar 2016, arXiv:1502.07943) if the places of a run
    halve each round. While there are places for all agents, all stay. The best agent is the elite,
    which explorations leave unchanged.
    """

    copies: ClassVar[bool] = False
    kind: Literal["halving"] = setting(
        "halving", "The best agents continue, as many as there are places; none is copied."
    )

    def plan(
        self, histories: Sequence[Sequence[Score]], places: int, rng: "np.random.Generator"
    ) -> tuple[Offspring, ...]:
        """Plan the next round without draws; failed agents leave first, by descending position."""
        del rng
        elite = rank(histories)[0]
        return tuple(Offspring(p, p, elite=p == elite) for p in best(histories, places))


@final
class NoSelection(Group):
    """All agents survive and none is copied; with fewer places, the worst agents leave."""

    copies: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    kind: Literal["none"] = setting("none", "All agents survive and none is copied.")

    def plan(
        self, histories: Sequence[Sequence[Score]], places: int, rng: "np.random.Generator"
    ) -> tuple[Offspring, ...]:
        """Plan the next round without draws; failed agents leave first, by descending position."""
        del rng
        return tuple(Offspring(position, position) for position in best(histories, places))
