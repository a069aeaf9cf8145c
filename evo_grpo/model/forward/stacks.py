"""Lays out a batch's rows by adapter, stacks a layer's adapters, and cuts rows into equal chunks.

A chunk holds rows of one agent. If the counts have a common divisor, a reshape cuts the rows, and
an agent's A and B are repeated for each of its chunks. Otherwise each agent is padded to whole
chunks with its own rows, so that no value, not even a NaN, reaches another agent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise, starmap
from operator import itemgetter
from typing import cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn


@dataclass(frozen=True)
class RowLayout:
    """The rows of a batch sorted by agent: `counts[i]` >= 0 rows of `adapters[i]`, not all 0.

    An adapter is PEFT's name, or None for the base without an adapter.
    """

    adapters: tuple[str | None, ...]
    counts: tuple[int, ...]

    def joined(self) -> RowLayout:
        """Return the layout with adjacent entries of the same adapter merged."""
        groups = groupby(zip(self.adapters, self.counts, strict=True), key=itemgetter(0))
        merged = [(name, sum(count for _, count in group)) for name, group in groups]
        return RowLayout(tuple(name for name, _ in merged), tuple(count for _, count in merged))

    @property
    def rows(self) -> int:
        """Total number of rows."""
        return sum(self.counts)

    def counts_of(self, adapters: Sequence[str | None]) -> tuple[int, ...]:
        """Return the number of rows of each of `adapters`, 0 for an adapter without rows.

        `adapters` must contain the adapters of the layout in the same order.
        """
        pairs = list(zip(self.adapters, self.counts, strict=True))
        counts = [pairs.pop(0)[1] if pairs and pairs[0][0] == name else 0 for name in adapters]
        assert not pairs, f"rows of {self.adapters} among those of {tuple(adapters)}"
        return tuple(counts)

    def slices(self) -> Iterator[slice]:
        """Return the rows of each agent as a slice of the batch."""
        return starmap(slice, pairwise(accumulate(self.counts, initial=0)))


@dataclass
class Stack:
    """The stacked adapters of one layer, a (N, R, in) and b (N, R, out), in the compute dtype.

    The LoRA scaling is included in b.
    """

    a: Tensor
    b: Tensor

    def select(self, agents: Tensor) -> Stack:
        """Return the stack of some agents; `agents` are their positions, on any device."""
        rows = agents.to(self.a.device)
        return Stack(self.a.index_select(0, rows), self.b.index_select(0, rows))


def build_stack(layer: LoraLayer, adapters: Sequence[str | None], dtype: torch.dtype) -> Stack:
    """Stack adapters of one layer, differentiably, padded with zeros to the largest rank.

    An adapter None, the base alone, becomes zeros; at least one must not be None.
    """
    lora_a = layer.lora_A
    # A slot may lack a module that another slot adapts: it adds nothing there.
    pairs = [
        None if name is None or name not in lora_a else adapter_weights(layer, name)
        for name in adapters
    ]
    present = [pair for pair in pairs if pair is not None]
    rank = max(a.shape[0] for a, _ in present)
    scales = [
        0.0 if pair is None else float(layer.scaling[str(name)])
        for name, pair in zip(adapters, pairs, strict=True)
    ]
    if len(present) == len(pairs) and all(a.shape[0] == rank for a, _ in present):
        return _stack_equal_ranks(present, scales, dtype)
    template_a, template_b = present[0]
    a_parts: list[Tensor] = []
    b_parts: list[Tensor] = []
    for pair, scale in zip(pairs, scales, strict=True):
        if pair is None:
            a_parts.append(template_a.new_zeros(rank, template_a.shape[1]))
            b_parts.append(template_b.new_zeros(rank, template_b.shape[0]))
            continue
        a, b = pair[0], pair[1].T
        padding = rank - a.shape[0]
        if padding:
            a = nn.functional.pad(a, (0, 0, 0, padding))
            b = nn.functional.pad(b, (0, 0, 0, padding))
        a_parts.append(a)
        b_parts.append(b * scale)
    return Stack(torch.stack(a_parts).to(dtype), torch.stack(b_parts).to(dtype))


def _stack_equal_ranks(
    pairs: Sequence[tuple[Tensor, Tensor]], scales: Sequence[float], dtype: torch.dtype
) -> Stack:
    """Stack adapters of equal rank, in as many operations for many adapters as for two."""
    if len(pairs) == 1:
        # One adapter needs no copy: unsqueeze keeps the floor (N = 1) free of stacking.
        a, b = pairs[0][0].unsqueeze(0), pairs[0][1].unsqueeze(0)
    else:
        a, b = torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])
    same = len(set(scales)) == 1
    b = b * (scales[0] if same else b.new_tensor(scales)[:, None, None])
    return Stack(a.to(dtype), b.to(dtype).transpose(1, 2))


def adapter_weights(layer: LoraLayer, name: str) -> tuple[Tensor, Tensor]:
    """Return the weights A (R, in) and B (out, R) of an adapter of a LoRA layer."""
    return (
        cast("Tensor", layer.lora_A[name].weight),
        cast("Tensor", layer.lora_B[name].weight),
    )


@dataclass(frozen=True)
class Chunks:
    """Chunks with equal numbers of rows.

    Attributes:
        count: Number of chunks.
        rows: Rows of each chunk.
        owners: (count,) index of each chunk's agent, or None if chunk i has all rows of agent i.
        gather: (count * rows,) for each position in the chunks, the index of its row in the batch.
        scatter: (B,) for each row of the batch, its position in the chunks. Both are None if no row
            moves.
    """

    count: int
    rows: int
    owners: Tensor | None = None
    gather: Tensor | None = None
    scatter: Tensor | None = None

    def placed(self, places: Sequence[int], total: int, device: torch.device) -> Chunks:
        """Return the chunks for a list of `total` agents, where agent i is at index `places[i]`."""
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
        """Cut gradients (B, ..., F) into (count, M, F); padding is zero."""
        if self.scatter is not None:
            padded = x.new_zeros(self.count * self.rows, *x.shape[1:])
            x = padded.index_copy_(0, self.scatter, x)
        return x.reshape(self.count, -1, x.shape[-1])

    def per_chunk(self, stack: Tensor) -> Tensor:
        """Return, for each chunk, its agent's entry of a stack (N, ...): (count, ...)."""
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
    """Divide the agents' rows, of `columns` tokens each, into the cheapest chunks.

    Small chunks repeat A and B; large chunks need padding. Both costs are counted in rows of
    activations; A and B of one chunk count as `rank` rows.
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
    chunk_owners = torch.tensor(owners, device=device)
    if common % size == 0:
        return Chunks(len(owners), size, chunk_owners)
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
        chunk_owners,
        torch.tensor(gather, device=device),
        torch.tensor(scatter, device=device),
    )
