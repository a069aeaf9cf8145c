"""Whole layers of either parent."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from evo_grpo.model.lora.recombine.product import Product


def layer_wise(parents: Sequence[Product], rank: int, rng: np.random.Generator) -> Product:
    """Return the update of one of the parents, drawn with equal probabilities for each layer."""
    del rank
    return parents[int(rng.integers(len(parents)))]
