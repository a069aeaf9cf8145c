"""The adapters of all agents as the kernels read them, and whose rows are whose.

The A of all agents are further rows of the weight, so that one product gives a linear layer and the
low columns of every agent; their B lie in one buffer. Adapters change when agents learn, so both
are copied once a rollout. Ranks are an agent's own: none is padded to that of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evo_grpo.model.forward.fused import FusedForward
from evo_grpo.model.forward.sending import send
from evo_grpo.model.forward.stacks import Stack, adapter_weights
from evo_grpo.model.llama.cuda.operators import TILE, padded
from evo_grpo.model.llama.weights import JoinedLinear, LlamaWeights, layers_of, linears_of, plain

#: Rows of a weight with the A of agents come in multiples of this, for which products are fast.
_ROWS = 64
#: Greatest share of a weight's rows that the A of agents have beside it; more are a product apart.
_BESIDE = 1 / 3


@dataclass(frozen=True)
class AdaptedLinear:
    """A joined linear layer with the adapters of all agents.

    Attributes:
        weight: (columns, in), the layer's own rows, then those of A if they are beside it.
        width: Output features of the layer.
        bias: (width,) or None.
        a: (low columns, in), the A of all agents if they are apart; else None.
        b: The B of all agents, see `kernels`.
        table: (N, parts, 3) int64, see `kernels`.
        rank: The greatest rank, rounded up to a multiple of 16; 0 without an adapter.
    """

    weight: Tensor
    width: int
    bias: Tensor | None
    a: Tensor | None
    b: Tensor
    table: Tensor
    rank: int

    def products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's product with x (B, in), with unread columns behind it, and `low`."""
        z = nn.functional.linear(x, self.weight)
        return z, z[:, self.width :] if self.a is None else nn.functional.linear(x, self.a)

    def of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, int, Tensor | None]:
        """Return the first arguments of the operators that finish the layer's product with x."""
        return *self.products(x), self.b, self.table, self.rank, self.bias


@dataclass(frozen=True)
class RowTables:
    """Whose rows are whose.

    Attributes:
        owners: (B,) int64, the agent of each row.
        tiles: (T, 3) int64: first row, rows and agent of each tile.
    """

    owners: Tensor
    tiles: Tensor

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> RowTables:
        """Return the tables of rows sorted by agent, given the number of rows of each."""
        tiles: list[tuple[int, int, int]] = []
        start = 0
        for agent, count in enumerate(counts):
            tiles += [
                (start + first, min(TILE, count - first), agent) for first in range(0, count, TILE)
            ]
            start += count
        owners = np.arange(len(counts)).repeat(counts)
        return cls(*send([owners, np.array(tiles).reshape(-1, 3)], device))


def adapted_layers(weights: LlamaWeights, fused: FusedForward) -> list[list[AdaptedLinear]]:
    """Return the four joined linear layers of each layer, with the adapters of a rollout."""
    base = weights.base
    plans = [[_Plan.of(weights, one, fused) for one in x.linears()] for x in weights.layers]
    different = {plan.entries: None for group in plans for plan in group}
    shape = len(fused.layout.adapters), -1, 3
    sent = send([np.array(entries).reshape(shape) for entries in different], base.device)
    tables = dict(zip(different, sent, strict=True))
    before: dict[int, Tensor] = base.derived.get("kernel weights", {})
    buffers: dict[int, Tensor] = {}
    found: list[list[AdaptedLinear]] = []
    for layer, group in zip(layers_of(base), plans, strict=True):
        modules = iter(linears_of(layer))
        own = [[plain(next(modules)) for _ in plan.stacks] for plan in group]
        found.append(
            [
                plan.built(linears, tables[plan.entries], before, buffers)
                for plan, linears in zip(group, own, strict=True)
            ]
        )
    base.derived["kernel weights"] = buffers
    return found


@dataclass(frozen=True)
class _Plan:
    """Where the adapters of a joined layer lie.

    Attributes:
        base: The layer.
        stacks: The adapters of each part; None where no agent adapts it.
        entries: Of the table, flat.
        ranks: Of each part, those of all agents.
    """

    base: JoinedLinear
    stacks: tuple[Stack | None, ...]
    entries: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, weights: LlamaWeights, base: JoinedLinear, fused: FusedForward) -> _Plan:
        """Return the plan of a joined layer."""
        adapters = fused.layout.adapters
        stacks: list[Stack | None] = []
        places: list[list[tuple[int, int, int]]] = []
        column = offset = 0
        for name, size in zip(base.names, base.sizes, strict=True):
            stack = fused.new_stack(name, weights.dtype)
            stacks.append(stack)
            places.append([])
            for adapter in adapters:
                rank = _rank(fused, name, adapter) if stack else 0
                places[-1].append((column, rank, offset))
                column += rank
                offset += stack.b.shape[1] * padded(size) if stack else 0
        entries = tuple(n for agent in zip(*places, strict=True) for place in agent for n in place)
        ranks = tuple(tuple(rank for _, rank, _ in part) for part in places)
        return cls(base, tuple(stacks), entries, ranks)

    def built(
        self, modules: list[Any], table: Tensor, before: dict[int, Tensor],
        buffers: dict[int, Tensor],
    ) -> AdaptedLinear:  # fmt: skip
        """Copy the adapters to their places; `buffers` gets the weight that has room for A."""
        base, own = self.base, self.base.weight.detach()
        width, low = own.shape[0], sum(map(sum, self.ranks))
        if not low:
            return AdaptedLinear(own, width, base.bias, None, own, table, 0)
        rank = padded(max(map(max, self.ranks)))
        rows, b = self._rows(own.dtype), self._b()
        if low > _BESIDE * width:
            return AdaptedLinear(own, width, base.bias, rows, b, table, rank)
        total = -(-(width + low) // _ROWS) * _ROWS
        weight = before.pop(own.data_ptr(), None)
        if weight is None or len(weight) < total or weight.dtype != own.dtype:
            del weight  # one layer at a time is there twice
            weight = _with_room(base, modules, total)
        buffers[weight.data_ptr()] = weight
        weight[width : width + low].copy_(rows)
        return AdaptedLinear(weight[:total], width, base.bias, None, b, table, rank)

    def _rows(self, dtype: torch.dtype) -> Tensor:
        """Return the A of all parts and agents, below each other."""
        rows: list[Tensor] = []
        for stack, ranks in zip(self.stacks, self.ranks, strict=True):
            if stack is None:
                continue
            if set(ranks) == {stack.a.shape[1]}:
                rows.append(stack.a.flatten(0, 1))
            else:
                rows += [a[:rank] for a, rank in zip(stack.a, ranks, strict=True) if rank]
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).to(dtype)

    def _b(self) -> Tensor:
        """Return the B of all parts and agents in one buffer."""
        parts: list[Tensor] = []
        for stack, size in zip(self.stacks, self.base.sizes, strict=True):
            if stack is not None:
                missing = padded(size) - size
                b = nn.functional.pad(stack.b, (0, missing)) if missing else stack.b
                parts.append(b.reshape(-1))
        return torch.cat(parts)


def _rank(fused: FusedForward, name: str, adapter: str | None) -> int:
    """Return the rank of an adapter in a layer, 0 if it leaves it out."""
    layer = fused.layers[name]
    if adapter is None or adapter not in layer.lora_A:
        return 0
    return adapter_weights(layer, adapter)[0].shape[0]


def _with_room(base: JoinedLinear, modules: Sequence[Any], rows: int) -> Tensor:
    """Return the weight of a joined layer with further rows, of which the parameters are views."""
    own = base.weight.detach()
    weight = own.new_zeros(rows, own.shape[1])
    weight[: len(own)].copy_(own)
    start = 0
    for module, size in zip(modules, base.sizes, strict=True):
        module.weight.data = weight[start : start + size]
        start += size
    base.weight = weight[: len(own)]
    return weight
