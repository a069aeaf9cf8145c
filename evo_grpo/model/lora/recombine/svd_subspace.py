"""The leading singular subspaces of both parents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evo_grpo.model.lora.recombine.product import Product, Spectrum

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


def svd_subspace(parents: Sequence[Product], rank: int, rng: np.random.Generator) -> Product:
    """Return the leading half of the better parent, filled up from what the other adds to it.

    Let P = U S V^T be the update of the better parent and Q that of the other. The child keeps the
    k = ceil(R / 2) largest singular values of P with their vectors, P_k = U_k S_k V_k^T. From Q it
    takes what lies outside of both subspaces, Q' = (I - U_k U_k^T) Q (I - V_k V_k^T), and of this
    the R - k largest singular values with their vectors: P_k + Q'_(R-k). The two parts are
    orthogonal, so no direction counts twice, and, unlike in an average, each keeps its size. If the
    parents are equal, Q' is the rest of P, and the child is P. Nothing is drawn.

    PopuLoRA (arXiv 2605.16727) claims that crossover in the subspaces of the singular vectors helps
    populations of adapters. The definition here is our own.
    """
    del rng
    better, other = parents
    kept = Spectrum.of(better).top((rank + 1) // 2)
    a, b = other.a.double(), other.b.double()
    outside = Product(
        a - (a @ kept.right.T) @ kept.right,
        b - kept.left @ (kept.left.T @ b),
        other.scale,
    )
    # Below the rounding of float32 of the parent itself, nothing is left of it.
    size = Spectrum.of(other).values
    rest = Spectrum.of(outside)
    real = int((rest.values > 1e-6 * size[:1].sum()).sum())
    return kept.beside(rest.top(min(real, rank - len(kept.values)))).product()
