"""The products with B of joined linear layers: one of a block-diagonal B, or one a part.

q, k and v side by side have an A of all parts along the rank, and their B are blocks on a diagonal.
As one tensor they need one product, most of it with zeros; apart they need one each. On a GPU a
launch costs more than zeros do. On a CPU, products of a small rank are slow for their size, so
zeros cost little there, and half of the time at rank 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from evo_grpo.model.forward.stacks import Stack

#: Rank from which a CPU multiplies parts apart: below it, gradients take up to twice as long apart.
_LEAST_RANK = 16
#: Multiply-adds that take as long on one core of a CPU as a further batched product needs to start.
_START = 1 << 20


class Block(NamedTuple):
    """A product with B: these rows of the joined rank add to these columns of the joined output.

    b is (N, rows, columns).
    """

    rows: slice
    columns: slice
    b: Tensor


def goes_apart(ranks: Sequence[int], device: torch.device) -> bool:
    """Return whether parts of these ranks may be multiplied apart."""
    return device.type == "cpu" and min(ranks) >= _LEAST_RANK


def as_one(blocks: Sequence[Block], ranks: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return the block-diagonal B (N, ranks, width)."""
    joined = blocks[0].b.new_zeros(len(blocks[0].b), ranks, width, dtype=dtype)
    for rows, columns, b in blocks:
        joined[:, rows, columns] = b
    return joined


@dataclass(frozen=True)
class JoinedStack:
    """The stacked adapters of joined linear layers.

    Attributes:
        a: (N, R, in), the A of all parts along the rank.
        parts: The B of each adapted part, which carries the scaling.
        width: Output features of all parts.
    """

    a: Tensor
    parts: tuple[Block, ...]
    width: int

    @classmethod
    def of(cls, stacks: Sequence[Stack | None], sizes: Sequence[int]) -> JoinedStack | None:
        """Join the stacks of parallel layers of these output features; None is not adapted."""
        parts: list[Block] = []
        row = column = 0
        for stack, size in zip(stacks, sizes, strict=True):
            if stack is not None:
                ranks = stack.b.shape[1]
                rows, columns = slice(row, row + ranks), slice(column, column + size)
                parts.append(Block(rows, columns, stack.b))
                row += ranks
            column += size
        known = [stack.a for stack in stacks if stack is not None]
        if not known:
            return None
        a = known[0] if len(known) == 1 else torch.cat(known, dim=1)
        made = cls(a, tuple(parts), column)
        apart = goes_apart([part.b.shape[1] for part in parts], a.device)
        return made if apart else cls(a, made._one, column)

    def blocks(self, tokens: int) -> tuple[Block, ...]:
        """Return what is faster for so many tokens in all."""
        apart = sum(b[0].numel() for _, _, b in self.parts)
        saved = tokens * (self.a.shape[1] * self.width - apart)
        return self.parts if saved >= (len(self.parts) - 1) * _START else self._one

    @cached_property
    def _one(self) -> tuple[Block, ...]:
        if len(self.parts) == 1:
            return self.parts
        joined = as_one(self.parts, self.a.shape[1], self.width, self.a.dtype)
        return (Block(slice(None), slice(None), joined),)
