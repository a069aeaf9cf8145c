"""The update of one layer, and its singular value decomposition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_NEGLIGIBLE = 1e-7
"""Singular values below this part of the largest are rounding errors of float32."""


@dataclass(frozen=True)
class Product:
    """The update s B A that an adapter adds to one layer.

    Attributes:
        a: A (R, in).
        b: B (out, R).
        scale: s.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0


@dataclass(frozen=True)
class Spectrum:
    """The singular value decomposition of a product, without singular values that are rounding.

    Attributes:
        left: Left singular vectors (out, R'), float64.
        values: Singular values (R',), the largest first, float64.
        right: Right singular vectors as rows (R', in), float64.
    """

    left: Tensor
    values: Tensor
    right: Tensor

    @classmethod
    def of(cls, product: Product) -> Spectrum:
        """Decompose a product; R' is at most its rank."""
        # The singular values of the product are those of a small matrix (R, R).
        left, upper = torch.linalg.qr(product.b.double() * product.scale)
        right, lower = torch.linalg.qr(product.a.double().T)
        u, values, vh = torch.linalg.svd(upper @ lower.T, full_matrices=False)
        rank = int((values > _NEGLIGIBLE * values[0]).sum())
        return cls(left @ u[:, :rank], values[:rank], vh[:rank] @ right.T)

    def top(self, rank: int) -> Spectrum:
        """Return the part with the largest singular values, at most `rank` of them."""
        return Spectrum(self.left[:, :rank], self.values[:rank], self.right[:rank])

    def beside(self, other: Spectrum) -> Spectrum:
        """Return the sum of two products with orthogonal singular vectors."""
        return Spectrum(
            torch.cat([self.left, other.left], dim=1),
            torch.cat([self.values, other.values]),
            torch.cat([self.right, other.right]),
        )

    def product(self) -> Product:
        """Return the product, with the singular values divided evenly between A and B."""
        root = self.values.sqrt()
        return Product(root[:, None] * self.right, self.left * root)
