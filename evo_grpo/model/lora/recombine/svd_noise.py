"""Noise on the singular values of one parent: a mutation of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from evo_grpo.model.lora.recombine.product import Product, Spectrum

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


@dataclass(frozen=True)
class SVDNoise:
    """Multiplies each singular value by exp(size * z), with z drawn from a normal distribution.

    The singular vectors stay, so the copy changes the outputs of its parent in the directions that
    the parent has learned, and in no other.

    Attributes:
        size: Standard deviation of the logarithm of the factors, >= 0.
    """

    size: float

    def __call__(self, parents: Sequence[Product], rank: int, rng: np.random.Generator) -> Product:
        """Return the update of the only parent with noise; see `Operator`."""
        del rank
        (parent,) = parents
        found = Spectrum.of(parent)
        # One draw for each rank, so that the draws of a layer do not depend on its weights.
        draws = torch.from_numpy(rng.standard_normal(len(parent.a)))[: len(found.values)]
        change = (self.size * draws).expm1()
        # With N the factors, U N U^T B A = U N S V^T: A stays, so AdamW's moments still fit it.
        b = parent.b.double()
        b = b + found.left @ (change[:, None] * (found.left.T @ b))
        return Product(parent.a, b.to(parent.b.dtype), parent.scale)
