"""Runs prompts and decode steps by kernels; more rows or larger LoRA ranks need no more launches.

A token's column in the cache is its position, so a row attends to its first columns without a mask.

The A of all agents are appended to the rows of the weight, so that one product gives x W^T and, in
the "low" columns, x A^T of every agent. The B of all agents are in one buffer. A and B are copied
once per rollout. No adapter is padded to another agent's LoRA rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from evo_grpo.model.forward.fused import FusedForward
from evo_grpo.model.forward.sending import send
from evo_grpo.model.forward.stacks import Stack, adapter_weights
from evo_grpo.model.llama import attention, cache, families
from evo_grpo.model.llama.cuda import operators
from evo_grpo.model.llama.cuda.operators import TILE, padded
from evo_grpo.model.llama.weights import (
    JoinedLayer,
    JoinedLinear,
    LlamaWeights,
    Norm,
    layers_of,
    linears_of,
    plain,
)
from evo_grpo.working import working

#: The rows of a weight with the A of agents are padded to a multiple of this, for fast products.
_ROWS = 64
#: The A of agents extend a weight by up to this share of its rows; more get their own product.
_BESIDE = 1 / 3


@dataclass(frozen=True)
class AdaptedLinear:
    """A joined linear layer with the adapters of all agents.

    Attributes:
        weight: (rows, in), the layer's weight, followed by the A of all agents if `a` is None.
        width: Output features of the layer.
        bias: (width,) or None.
        a: (low columns, in), the A of all agents if `weight` lacks them; else None.
        b: The B of all agents, see `kernels`.
        table: (N, parts, 3) int64, see `kernels`.
        rank: The greatest LoRA rank, rounded up to a multiple of 16; 0 without an adapter.
    """

    weight: Tensor
    width: int
    bias: Tensor | None
    a: Tensor | None
    b: Tensor
    table: Tensor
    rank: int

    def products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return z, whose first `width` columns are x W^T, and `low`, x A^T, for x (B, in)."""
        z = nn.functional.linear(x, self.weight)
        return z, z[:, self.width :] if self.a is None else nn.functional.linear(x, self.a)

    def of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, int, Tensor | None]:
        """Return the first arguments of the operators that add adapters and bias to x W^T."""
        return *self.products(x), self.b, self.table, self.rank, self.bias


@dataclass(frozen=True)
class RowTables:
    """Tables of rows: `owners` (B,) int64 has each row's agent; `tiles` (n, 3) int64 has n tiles.

    A tile has its first row, its number of rows and their agent.
    """

    owners: Tensor
    tiles: Tensor

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> RowTables:
        """Return the tables of rows sorted by agent; `counts` are the numbers of rows of agents."""
        tiles: list[tuple[int, int, int]] = []
        start = 0
        for agent, count in enumerate(counts):
            tiles += [(start + row, min(TILE, count - row), agent) for row in range(0, count, TILE)]
            start += count
        owners = np.arange(len(counts)).repeat(counts)
        return cls(*send([owners, np.array(tiles).reshape(-1, 3)], device))


def adapted_layers(weights: LlamaWeights, fused: FusedForward) -> list[list[AdaptedLinear]]:
    """Return the four joined linear layers of each decoder layer, with a rollout's adapters."""
    base = weights.base
    plans = [[_Plan.of(weights, linear, fused) for linear in x.linears()] for x in weights.layers]
    unique = {plan.entries: None for group in plans for plan in group}
    shape = len(fused.layout.adapters), -1, 3
    tensors = send([np.array(entries).reshape(shape) for entries in unique], base.device)
    tables = dict(zip(unique, tensors, strict=True))
    old_buffers: dict[int, Tensor] = base.derived.get("kernel weights", {})
    buffers: dict[int, Tensor] = {}
    layers: list[list[AdaptedLinear]] = []
    for layer, group in zip(layers_of(base), plans, strict=True):
        modules = iter(linears_of(layer))
        group_modules = [[plain(next(modules)) for _ in plan.stacks] for plan in group]
        layers.append(
            [
                plan.built(linears, tables[plan.entries], old_buffers, buffers)
                for plan, linears in zip(group, group_modules, strict=True)
            ]
        )
    base.derived["kernel weights"] = buffers
    return layers


@dataclass(frozen=True)
class _Plan:
    """How the adapters of a joined layer, `base`, are laid out in the buffers.

    Attributes:
        stacks: The adapters of each part; None where no agent adapts it.
        entries: The numbers of `AdaptedLinear.table`, flat.
        ranks: For each part, the LoRA ranks of all agents.
    """

    base: JoinedLinear
    stacks: tuple[Stack | None, ...]
    entries: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, weights: LlamaWeights, base: JoinedLinear, fused: FusedForward) -> _Plan:
        """Plan the buffers of the joined layer `base`, for the adapters of a rollout."""
        adapters = fused.layout.adapters
        stacks: list[Stack | None] = []
        parts: list[list[tuple[int, int, int]]] = []
        column = offset = 0
        for name, size in zip(base.names, base.sizes, strict=True):
            stack = fused.new_stack(name, weights.dtype)
            stacks.append(stack)
            parts.append([])
            for adapter in adapters:
                rank = _rank(fused, name, adapter) if stack else 0
                parts[-1].append((column, rank, offset))
                column += rank
                offset += stack.b.shape[1] * padded(size) if stack else 0
        entries = tuple(n for agent in zip(*parts, strict=True) for entry in agent for n in entry)
        ranks = tuple(tuple(rank for _, rank, _ in part) for part in parts)
        return cls(base, tuple(stacks), entries, ranks)

    def built(
        self, modules: list[Any], table: Tensor, before: dict[int, Tensor],
        buffers: dict[int, Tensor],
    ) -> AdaptedLinear:  # fmt: skip
        """Return the layer with its adapters; a weight with A moves from `before` to `buffers`."""
        base, base_weight = self.base, self.base.weight.detach()
        width, low_columns = base_weight.shape[0], sum(map(sum, self.ranks))
        if not low_columns:
            return AdaptedLinear(base_weight, width, base.bias, None, base_weight, table, 0)
        rank = padded(max(map(max, self.ranks)))
        rows, b = self._rows(base_weight.dtype), self._b()
        if low_columns > _BESIDE * width:
            return AdaptedLinear(base_weight, width, base.bias, rows, b, table, rank)
        total = -(-(width + low_columns) // _ROWS) * _ROWS
        weight = before.pop(base_weight.data_ptr(), None)
        if weight is None or len(weight) < total or weight.dtype != base_weight.dtype:
            del weight  # only one layer at a time is in memory twice
            weight = _with_room(base, modules, total)
        buffers[weight.data_ptr()] = weight
        weight[width : width + low_columns].copy_(rows)
        return AdaptedLinear(weight[:total], width, base.bias, None, b, table, rank)

    def _rows(self, dtype: torch.dtype) -> Tensor:
        """Return the A of all parts and agents as rows of one tensor."""
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
                padding = padded(size) - size
                b = nn.functional.pad(stack.b, (0, padding)) if padding else stack.b
                parts.append(b.reshape(-1))
        return torch.cat(parts)


def _rank(fused: FusedForward, name: str, adapter: str | None) -> int:
    layer = fused.layers[name]
    if adapter is None or adapter not in layer.lora_A:
        return 0
    return adapter_weights(layer, adapter)[0].shape[0]


def _with_room(base: JoinedLinear, modules: Sequence[Any], rows: int) -> Tensor:
    """Copy a joined layer's weight into a tensor of `rows` rows; parameters become views of it."""
    old_weight = base.weight.detach()
    weight = old_weight.new_zeros(rows, old_weight.shape[1])
    weight[: len(old_weight)].copy_(old_weight)
    start = 0
    for module, size in zip(modules, base.sizes, strict=True):
        module.weight.data = weight[start : start + size]
        start += size
    base.weight = weight[: len(old_weight)]
    return weight


#: Columns of the cache come in multiples of this, so that kernels know that rows are aligned.
_COLUMNS = 64
_COMPILED = "kernels compiled"
Rotation: TypeAlias = tuple[Tensor, Tensor] | tuple[None, None]


class LayerParts:
    """Norms, rotary table and window of a layer; `following` is the next layer's first norm."""

    def __init__(self, layer: JoinedLayer, following: Norm, kind: families.LayerKind) -> None:
        self.table, self.window = kind.table, kind.window or 0
        q_norm, k_norm = map(_weight, layer.head_norms) if layer.head_norms else ((None, 0.0),) * 2
        #: Weights and eps of the norms of q and k.
        self.head_norms = q_norm[0], k_norm[0], q_norm[1], k_norm[1]
        _, after_attention, before_mlp, after_mlp = layer.norms
        assert before_mlp is not None, "a family of kernels has a norm before the MLP"
        #: Norm of what is added, and norm of the sum: for the attention, then for the MLP.
        self.norms = [_norms(after_attention, before_mlp), _norms(after_mlp, following)]


def rotations_of(weights: LlamaWeights, columns: int) -> dict[str | None, Rotation]:
    """Return cos and sin (columns, D / 2) of each rotary table; key None means no rotation."""
    d = weights.description
    like = weights.embed(torch.zeros(1, 1, dtype=torch.long, device=weights.base.device))
    half = d.head_dim // 2
    rotary_tables: dict[str | None, Rotation] = {None: (None, None)}
    for table in d.tables:
        cos, sin = weights.rotary(columns, like, table)
        if sin is not None:
            rotary_tables[table] = cos[:, :half].contiguous(), sin[:, half:].contiguous()
    return rotary_tables


def parts_of(weights: LlamaWeights) -> tuple[list[LayerParts], tuple[Tensor, float]]:
    """Return the `LayerParts` of each layer, and the weight and eps of the first layer's norm."""
    norms = [*(layer.norms[0] for layer in weights.layers), weights.norm]
    assert norms[0] is not None, "a family of kernels has a norm before the attention"
    return [
        LayerParts(layer, following or weights.norm, kind)
        for layer, following, kind in zip(
            weights.layers, norms[1:], weights.description.layers, strict=True
        )
    ], _weight(norms[0])


def embedded(
    weights: LlamaWeights, norm: tuple[Tensor, float], tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the input (M, H) of the first layer, and its normalized copy."""
    embed, (weight, eps) = weights.embed, norm
    if type(embed) is nn.Embedding:
        factor = weights.description.embedding_multiplier
        return operators.embed_norm(tokens, embed.weight, weight, factor, eps)
    x = weights.embedded(tokens)
    return x, nn.functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def _weight(norm: Norm) -> tuple[Tensor, float]:
    return norm.weight.detach(), norm.eps


def _norms(after: Norm | None, following: Norm) -> tuple[Tensor | None, float, Tensor, float]:
    post, post_eps = (None, 0.0) if after is None else _weight(after)
    return post, post_eps, *_weight(following)


@final
class KernelDecoder:
    """Decodes one rollout with `LlamaWeights` and the active adapters; see `Decoder`.

    `columns` is the maximum number of tokens of a row, for the rotary tables.
    """

    def __init__(self, weights: LlamaWeights, fused: FusedForward, columns: int) -> None:
        self.weights = weights
        self.fused = fused
        self._described = weights.description
        self._linears = adapted_layers(weights, fused)
        self._adapters = fused.layout.adapters
        self._layers, self._first = parts_of(weights)
        self._rotations = rotations_of(weights, columns)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._rows: RowTables | None = None

    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Run prompts (NP, Tp); see `Decoder`."""
        (prompts, columns), d = ids.shape, self._described
        shape = prompts, d.kv_heads, columns, d.head_dim
        layers = range(len(self._layers))
        dtype, device = self.weights.dtype, ids.device
        self._keys = [torch.empty(shape, dtype=dtype, device=device) for _ in layers]
        self._values = [torch.empty_like(keys) for keys in self._keys]
        masks: dict[int, Tensor] = {}

        def attend(number: int, q: Tensor) -> Tensor:
            window = self._layers[number].window
            queries = q.view(prompts, columns, d.heads, d.head_dim).transpose(1, 2)
            k, v = self._keys[number], self._values[number]
            return attention.attend_prompts(queries, k, v, d.scale, window or None, masks).flatten(
                0, 1
            )

        positions = torch.arange(columns, device=device).repeat(prompts)
        derived = self.weights.base.derived
        with nullcontext() if derived.get(_COMPILED) else working("compile the kernels"):
            tokens = ids.flatten().contiguous()  # a column of a wider tensor has strides
            hidden = self._run(tokens, positions, self._tables(columns), attend)
        derived[_COMPILED] = True
        return hidden[torch.arange(prompts, device=device) * columns + lengths - 1]

    def expand(self, source: Tensor, columns: int, mask: Tensor) -> None:
        """Expand prompt rows to completion rows; see `Decoder`."""
        del mask  # the padding of a prompt has the columns of the tokens that follow it
        room = -(-columns // _COLUMNS) * _COLUMNS
        for buffers in (self._keys, self._values):
            for i, buffer in enumerate(buffers):
                expanded = buffer.new_empty(source.shape[0], buffer.shape[1], room, buffer.shape[3])
                expanded[:, :, : buffer.shape[2]] = buffer.index_select(0, source)
                buffers[i] = expanded
        self._rows = None

    def keep(self, rows: Tensor) -> None:
        """Remove all rows but those at the positions `rows`; see `Decoder`."""
        for buffers in (self._keys, self._values):
            for i, buffer in enumerate(buffers):
                buffers[i] = buffer.index_select(0, rows)
        self._rows = None

    def beside(self) -> KernelDecoder:
        """Return a decoder with an empty cache; see `RefillDecoder`."""
        decoder = copy(self)
        decoder._keys, decoder._values, decoder._rows = [], [], None
        return decoder

    def refill(self, arrived: KernelDecoder | None, moves: cache.Refill) -> int:
        """Move the rows that stay and add the rows of `arrived`; see `RefillDecoder`."""
        rows = len(moves.stay_to) + len(moves.join_to)
        joining = (arrived._keys, arrived._values) if arrived else ([], [])
        prompt_columns = joining[0][0].shape[2] if arrived else 0
        for buffers, arriving in zip((self._keys, self._values), joining, strict=True):
            for i, buffer in enumerate(buffers):
                refilled = buffer.new_empty(rows, *buffer.shape[1:])
                refilled.index_copy_(0, moves.stay_to, buffer)
                buffers[i] = refilled
                if arrived:
                    block = refilled[:, :, :prompt_columns]
                    block.index_copy_(0, moves.join_to, arriving[i].index_select(0, moves.source))
                    arriving[i] = buffer.new_empty(0)  # frees it
        self._rows = None
        # Columns are positions within a row, so those of the rows that stay do not count.
        return prompt_columns

    def reserve(self, columns: int) -> int | None:
        """Prepare the next steps; see `Decoder`."""
        del columns  # there is room for all
        if self._rows is None:
            self._rows = self._tables(1)
        return self._keys[0].shape[2]

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Run one token per row; see `Decoder`."""
        assert self._rows is not None, "reserve() comes first"

        def attend(number: int, q: Tensor) -> Tensor:
            keys, window = self._keys[number], self._layers[number].window
            inputs = q, keys, self._values[number], positions, self._described.scale, window
            if min(keys.shape[2], window or keys.shape[2]) <= operators.UNSPLIT:
                return operators.attend(*inputs)
            return operators.join_splits(*operators.attend_splits(*inputs), q)

        return self._run(tokens, positions, self._rows, attend)

    def _tables(self, columns: int) -> RowTables:
        """Return the tables for `columns` tokens in each row of the layout."""
        counts = self.fused.layout.counts_of(self._adapters)
        return RowTables.of([count * columns for count in counts], self.weights.base.device)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: RowTables,
        attend: Callable[[int, Tensor], Tensor],
    ) -> Tensor:
        """Run tokens (M,) at positions; return final hidden states (M, H).

        `attend` maps a layer's number and queries (M, heads, D) to outputs (M, heads * D).
        """
        d = self._described
        x, normed = embedded(self.weights, self._first, tokens)
        for i, (layer, linears) in enumerate(zip(self._layers, self._linears, strict=True)):
            q = x.new_empty(len(x), d.heads, d.head_dim)
            operators.qkv(
                *linears[0].of(normed), rows.tiles, positions, *self._rotations[layer.table],
                *layer.head_norms, q, self._keys[i], self._values[i],
            )  # fmt: skip
            factor = d.residual_multiplier
            x, normed = operators.add_norm(
                *linears[1].of(attend(i, q)), rows.owners, x, *layer.norms[0], factor
            )
            inner = operators.gate_up(
                *linears[2].of(normed), rows.tiles, linears[3].weight.shape[1], d.gelu
            )  # fmt: skip
            x, normed = operators.add_norm(
                *linears[3].of(inner), rows.owners, x, *layer.norms[1], factor
            )
        return normed
