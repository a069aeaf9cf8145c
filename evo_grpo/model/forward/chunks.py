"""Cutting of rows into equal chunks, so that batched matmuls serve agents with unequal row counts.

A chunk holds rows of one agent. If the counts have a common divisor, a reshape cuts the rows, and
the A and B of an agent are repeated for each of its chunks. Otherwise each agent is padded to whole
chunks with its own rows, so that no value, not even a NaN, reaches another agent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunks:
    """Chunks with equal numbers of rows.

    Attributes:
        count: Number of chunks.
        rows: Rows of each chunk.
        owners: (count,) agent of each chunk, or None if chunk i has all rows of agent i.
        gather: (count * rows,) row at each place of a chunk, or None if no row moves.
        scatter: (B,) place of each row, or None if no row moves.
    """

    count: int
    rows: int
    owners: Tensor | None = None
    gather: Tensor | None = None
    scatter: Tensor | None = None

    def placed(self, places: Sequence[int], total: int, device: torch.device) -> Chunks:
        """Return the chunks with owners as indices into a longer list of `total` agents."""
        if self.owners is None and list(places) == list(range(total)):
            return self
        where = torch.tensor(places, device=device)
        return replace(self, owners=where if self.owners is None else where[self.owners])

    def split(self, x: Tensor) -> Tensor:
        """Cut (B, ..., F) into (count, M, F); padding repeats a row of the same agent."""
        if self.gather is not None:
            x = x.index_select(0, self.gather)
        return x.reshape(self.count, -1, x.shape[-1])

    def spread(self, x: Tensor) -> Tensor:
        """Cut (B, ..., F) into (count, M, F) with zeros as padding, for gradients."""
        if self.scatter is not None:
            places = x.new_zeros(self.count * self.rows, *x.shape[1:])
            x = places.index_copy_(0, self.scatter, x)
        return x.reshape(self.count, -1, x.shape[-1])

    def per_chunk(self, stack: Tensor) -> Tensor:
        """Return (N, ...) tensors of agents as (count, ...), one per chunk; differentiable."""
        return stack if self.owners is None else stack.index_select(0, self.owners)

    def per_agent(self, values: Tensor, agents: int) -> Tensor:
        """Sum (count, ...) over the chunks of each of N agents: the backward of `per_chunk`."""
        if self.owners is None:
            return values
        return values.new_zeros(agents, *values.shape[1:]).index_add_(0, self.owners, values)

    def add_product(self, result: Tensor, low: Tensor, b: Tensor) -> None:
        """Add low (count, M, R) @ b (count, R, F) to the rows of result (B, ..., F), in place."""
        if self.scatter is None:
            result.view(self.count, -1, result.shape[-1]).baddbmm_(low, b)
            return
        product = torch.bmm(low, b).view(self.count * self.rows, *result.shape[1:])
        result.add_(product.index_select(0, self.scatter))


def make_chunks(counts: tuple[int, ...], columns: int, rank: int, device: torch.device) -> Chunks:
    """Choose the cheapest chunks for the rows of each agent, of `columns` tokens.

    Small chunks repeat A and B often, and large chunks need padding. Both cost memory traffic,
    measured in rows of activations; the A and B of one chunk count as `rank` rows.
    """
    if len(set(counts)) == 1:
        return Chunks(len(counts), counts[0])
    common = math.gcd(*counts)
    sizes = {common, *(1 << i for i in range(max(counts).bit_length())), max(counts)}

    def cost(size: int) -> float:
        padded = sum(-(-count // size) * size for count in counts)
        moved = 0 if size == common or common % size == 0 else 2 * padded
        return padded * columns + moved * columns + padded // size * rank

    size = min(sorted(sizes, reverse=True), key=cost)
    owners = [agent for agent, count in enumerate(counts) for _ in range(-(-count // size))]
    where = torch.tensor(owners, device=device)
    if common % size == 0:
        return Chunks(len(owners), size, where)
    gather: list[int] = []
    scatter: list[int] = []
    start = 0
    for count in counts:
        scatter += range(len(gather), len(gather) + count)
        gather += range(start, start + count)
        gather += [start] * (-count % size)
        start += count
    return Chunks(
        len(owners),
        size,
        where,
        torch.tensor(gather, device=device),
        torch.tensor(scatter, device=device),
    )
