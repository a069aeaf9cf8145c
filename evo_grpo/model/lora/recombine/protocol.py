"""The protocol of an operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from evo_grpo.model.lora.recombine.product import Product


class Operator(Protocol):
    """Makes the update of one layer from those of one or two parents.

    An operator depends on the products s B A alone, not on how they are factored, and parents that
    are equal have a child that is equal to them (noise of 0). Parents may differ in rank and scale.
    """

    def __call__(self, parents: Sequence[Product], rank: int, rng: np.random.Generator) -> Product:
        """Return the update of the child.

        Args:
            parents: The updates of the parents, the better parent first.
            rank: Rank R of the child in this layer. A result of a larger rank is cut to the nearest
                product of that rank.
            rng: Stream of all draws of the child, which calls it layer by layer.
        """
        ...
