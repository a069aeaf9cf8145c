"""Successive halving: the best go on, in ever fewer places, and nobody is copied."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, final

from evo_grpo.evolve.select.protocol import Offspring
from evo_grpo.evolve.select.rank import best, rank
from evo_grpo.schema.group import Group, setting
from evo_grpo.types import Score

if TYPE_CHECKING:
    import numpy as np


@final
class HalvingSelection(Group):
    """The best agents fill the places of the next round; the others leave, and nobody is copied.

    Successive halving (Jamieson & Talwalkar 2016, arXiv:1502.07943), where the places of a run
    halve from round to round. While there are places for all, everyone stays. The best agent is
    the elite, which explorations leave as it is.
    """

    kind: Literal["halving"] = setting(
        "halving", "The best agents go on, as many as there are places; nobody is copied."
    )

    def plan(
        self, histories: Sequence[Sequence[Score]], places: int, rng: "np.random.Generator"
    ) -> tuple[Offspring, ...]:
        """Plan the next round; see `Selector`. Nothing is drawn.

        Failed agents are the first to leave, the one with the highest position first.
        """
        del rng
        elite = rank(histories)[0]
        return tuple(Offspring(p, p, elite=p == elite) for p in best(histories, places))
