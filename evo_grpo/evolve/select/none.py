"""No selection: independent agents, the baseline that a selection has to beat."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, final

from evo_grpo.evolve.select.protocol import Offspring
from evo_grpo.evolve.select.rank import best
from evo_grpo.schema.group import Group, setting
from evo_grpo.types import Score

if TYPE_CHECKING:
    import numpy as np


@final
class NoSelection(Group):
    """All agents survive and none is copied; with fewer places, the worst agents leave."""

    copies: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    kind: Literal["none"] = setting("none", "All agents survive and none is copied.")

    def plan(
        self, histories: Sequence[Sequence[Score]], places: int, rng: "np.random.Generator"
    ) -> tuple[Offspring, ...]:
        """Plan the next round without draws; failed agents leave first, from the last position."""
        del rng
        return tuple(Offspring(position, position) for position in best(histories, places))
