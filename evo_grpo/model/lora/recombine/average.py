"""The average of the parents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from evo_grpo.model.lora.recombine.product import Product

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


def average(parents: Sequence[Product], rank: int, rng: np.random.Generator) -> Product:
    """Return the mean of the products, of the sum of their ranks; nothing is drawn.

    The mean of A and the mean of B have another product, which depends on how the parents are
    factored; for related parents the two are close.
    """
    del rank, rng
    share = [parent.b * (parent.scale / len(parents)) for parent in parents]
    return Product(torch.cat([parent.a for parent in parents]), torch.cat(share, dim=1))
