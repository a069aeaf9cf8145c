"""Decodes models of the Llama family with a third of the operations of the modules.

On small models the overhead of operations dominates. It is reduced by joined linear layers (see
`evo_grpo.model.llama.weights`), whose matmul also adds the residual; by a cache for one query per
row (see `evo_grpo.model.llama.cache`); and by one look-up of rotary tables per step. Results agree
with the modules' forward up to rounding.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from evo_grpo.model.forward.fused import FusedForward
from evo_grpo.model.forward.stacks import Chunks, make_chunks
from evo_grpo.model.llama.adapter_views import Block, JoinedStack
from evo_grpo.model.llama.attention import attend_prompts
from evo_grpo.model.llama.cache import FixedCache, Refill, cache_for
from evo_grpo.model.llama.families import Description
from evo_grpo.model.llama.functions import activated, rotate
from evo_grpo.model.llama.weights import JoinedLayer, JoinedLinear, LlamaWeights, Norm


@dataclass(frozen=True)
class _Linear:
    """A joined linear layer with the adapters of the rows in the batch."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None = None
    blocks: tuple[Block, ...] = ()


class _Norm:
    """Applies a norm of the model in few operations, to save overhead with few rows.

    On a CPU there are four operations: x / hypot(|x|, sqrt(H eps)) * (sqrt(H) w), which equals x /
    sqrt(mean(x^2) + eps) * w. Other devices use torch's function, which rounds only after
    multiplying by the weight.
    """

    def __init__(self, norm: Norm) -> None:
        self.module = norm.module
        weight, raw = norm.weight, self.module.weight
        self.fused = raw.device.type != "cpu" and weight.dtype == raw.dtype
        # transformers normalizes in fp32 whatever the dtype, and rounds before the weight.
        self.plain = not self.fused and (raw.dtype != torch.float32 or raw.device.type != "cpu")
        self.factor, self.eps = weight, norm.eps
        if not self.fused and not self.plain:
            size = weight.shape[0]
            self.weight = weight * size**0.5
            self.least = weight.new_tensor((size * norm.eps) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        if self.fused:
            return nn.functional.rms_norm(x, self.factor.shape, self.factor, self.eps)
        if self.plain:
            return self.module(x)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.div(torch.hypot(length, self.least)).mul_(self.weight)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x plus the normalized y; overwrites both."""
        if self.fused or self.plain:
            return x.add_(self(y))
        length = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        return x.addcmul_(y.div_(torch.hypot(length, self.least)), self.weight)


class _HeadNorms:
    """The norms of concatenated q and k (..., heads + kv_heads, D).

    On a CPU both norms are one operation if each head is normalized separately.
    """

    def __init__(self, norms: tuple[Norm, ...], described: Description) -> None:
        q, k = self.norms = tuple(map(_Norm, norms))
        self.counts = described.heads, described.kv_heads
        self.all = described.family.head_norms == "all"
        self.joined = not (self.all or q.fused or q.plain or k.fused or k.plain)
        if self.joined:
            pairs = list(zip((q, k), self.counts, strict=True))
            self.weight = torch.cat([norm.weight.expand(count, -1) for norm, count in pairs])
            self.least = torch.cat([norm.least.expand(count, 1) for norm, count in pairs])

    def __call__(self, x: Tensor) -> Tensor:
        if self.joined:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x.div(torch.hypot(length, self.least)).mul_(self.weight)
        parts = x.split(self.counts, dim=-2)
        if self.all:
            parts = [
                norm(part.flatten(-2)).view(part.shape)
                for norm, part in zip(self.norms, parts, strict=True)
            ]
        else:
            parts = [norm(part) for norm, part in zip(self.norms, parts, strict=True)]
        return torch.cat(parts, dim=-2)


class _Layer:
    """The norms of a decoder layer, None for a norm that it lacks, and its rotary table's name."""

    def __init__(self, layer: JoinedLayer, described: Description, number: int) -> None:
        self.before, self.after, self.then, self.last = (
            None if norm is None else _Norm(norm) for norm in layer.norms
        )
        self.heads: _HeadNorms | None = None
        if layer.head_norms:
            self.heads = _HeadNorms(layer.head_norms, described)
        self.table = described.layers[number].table


@final
class LlamaDecoder:
    """Decodes one rollout with `LlamaWeights` and the active adapters; see `Decoder`.

    `columns` is the maximum number of tokens of a row, for the rotary tables.
    """

    def __init__(self, weights: LlamaWeights, fused: FusedForward, columns: int) -> None:
        self.weights = weights
        self.fused = fused
        probe = weights.embed(torch.zeros(1, 1, dtype=torch.long, device=weights.base.device))
        d = self._described = weights.description
        rotary = ((table, *weights.rotary(columns, probe, table)) for table in d.tables)
        self.tables = {table: (cos, sin) for table, cos, sin in rotary if sin is not None}
        self.cache = cache_for(weights.base.device, d.scale, d.windows)
        self._adapters = fused.layout.adapters
        self._stacks = [
            [
                JoinedStack.of(
                    [fused.new_stack(name, weights.dtype) for name in base.names], base.sizes
                )
                for base in layer.linears()
            ]
            for layer in weights.layers
        ]
        self._layers = [_Layer(layer, d, number) for number, layer in enumerate(weights.layers)]
        self._last_norm = _Norm(weights.norm)
        self._chunks: Chunks | None = None
        self._linears: list[list[_Linear]] = []

    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Run prompts (NP, Tp); see `Decoder`."""
        w = self.weights
        rows, columns = ids.shape
        self._prepare(columns)
        x = w.embedded(ids)
        rotary = {table: (c[:columns], s[:columns]) for table, (c, s) in self.tables.items()}
        d = self._described
        rotated_heads = d.heads + d.kv_heads
        masks: dict[int, Tensor] = {}
        for linears, layer, kind in zip(
            self._linears, self._layers, self._described.layers, strict=True
        ):
            joined = self._linear(linears[0], x if layer.before is None else layer.before(x))
            joined = joined.unflatten(-1, (-1, d.head_dim))
            q_and_k, v = joined[:, :, :rotated_heads], joined[:, :, rotated_heads:].transpose(1, 2)
            if layer.heads is not None:
                q_and_k = layer.heads(q_and_k)
            q, k = (part.transpose(1, 2) for part in q_and_k.split((d.heads, d.kv_heads), dim=2))
            if layer.table is not None:
                q, k = rotate(q, *rotary[layer.table]), rotate(k, *rotary[layer.table])
            self.cache.append(k, v)
            # Prompts are padded on the right, where causal attention never looks.
            mixed = attend_prompts(q, k, v, d.scale, kind.window, masks)
            x = self._rest(linears, layer, x, mixed)
        last_hidden = x[torch.arange(rows, device=x.device), lengths - 1]
        return self._last_norm(last_hidden)

    def expand(self, source: Tensor, columns: int, mask: Tensor) -> None:
        """Expand prompt rows to completion rows; see `Decoder`."""
        self.cache.expand(source, columns, mask)
        self._chunks = None

    def keep(self, rows: Tensor) -> None:
        """Remove all rows but those at the positions `rows`; see `Decoder`."""
        self.cache.keep(rows)
        self._chunks = None

    def beside(self) -> LlamaDecoder:
        """Return a decoder with an empty cache; see `RefillDecoder`."""
        decoder = copy(self)
        decoder.cache = cache_for(
            self.weights.base.device, self._described.scale, self._described.windows
        )
        return decoder

    def refill(self, arrived: LlamaDecoder | None, moves: Refill) -> int:
        """Move the rows that stay and add the rows of `arrived`; see `RefillDecoder`."""
        self._chunks = None
        cache, joining = self.cache, arrived and arrived.cache
        assert isinstance(cache, FixedCache), "rows wait on other devices than a CPU alone"
        assert joining is None or isinstance(joining, FixedCache)
        return cache.refill(joining, moves)

    def reserve(self, columns: int) -> int | None:
        """Prepare the next steps; see `Decoder`."""
        if self._chunks is None:
            # Rows and adapters have changed.
            self._prepare(1)
        self.cache.reserve(columns)
        return self.cache.width

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Run one token per row; see `Decoder`."""
        w = self.weights
        rows = tokens.shape[0]
        x = w.embedded(tokens)
        rotary = {
            table: (c.index_select(0, positions)[:, None], s.index_select(0, positions)[:, None])
            for table, (c, s) in self.tables.items()
        }
        d = self._described
        rotated_heads = d.heads + d.kv_heads
        self.cache.begin()
        layers = zip(self._linears, self._layers, strict=True)
        for number, (linears, layer) in enumerate(layers):
            parts = self._linear(linears[0], x if layer.before is None else layer.before(x))
            parts = parts.view(rows, -1, d.head_dim)
            q_and_k = parts[:, :rotated_heads]
            if layer.heads is not None:
                q_and_k = layer.heads(q_and_k)
            if layer.table is not None:
                q_and_k = rotate(q_and_k, *rotary[layer.table])
            q, k = q_and_k.split((d.heads, d.kv_heads), dim=1)
            mixed = self.cache.attend(number, q, k, parts[:, rotated_heads:])
            x = self._rest(linears, layer, x, mixed)
        return self._last_norm(x)

    def _rest(self, linears: list[_Linear], layer: _Layer, x: Tensor, mixed: Tensor) -> Tensor:
        """Return a layer's output, written over its input x; `mixed` is its attention's output."""
        x = self._added(linears[1], mixed, x, layer.after)
        gate_and_up = self._linear(linears[2], x if layer.then is None else layer.then(x))
        gate, up = gate_and_up.chunk(2, dim=-1)
        inner = activated(gate, self._described.gelu).mul_(up)
        return self._added(linears[3], inner, x, layer.last)

    def _added(self, linear: _Linear, inner: Tensor, x: Tensor, norm: _Norm | None) -> Tensor:
        """Return the residual x plus the normalized output of a linear layer; overwrites x."""
        factor = self._described.residual_multiplier
        if norm is None and factor == 1.0:
            return self._linear(linear, inner, x)
        y = self._linear(linear, inner)
        return x.add_(y, alpha=factor) if norm is None else norm.add(x, y)

    def _linear(self, linear: _Linear, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Apply a joined layer, and to each row its agent's adapter; add to `residual` in place."""
        if residual is None:
            y = nn.functional.linear(x, linear.weight, linear.bias)
        else:
            y = residual
            y.flatten(0, -2).addmm_(x.flatten(0, -2), linear.weight.t())
            if linear.bias is not None:
                y.add_(linear.bias)
        if linear.a is not None:
            assert self._chunks is not None
            low = torch.bmm(self._chunks.split(x), linear.a)
            for rows, columns, b in linear.blocks:
                self._chunks.add_product(y[..., columns], low[..., rows], b)
        return y

    def _prepare(self, columns: int) -> None:
        """Assign the stacked adapters to the rows in the batch, of `columns` tokens each."""
        counts = self.fused.layout.counts_of(self._adapters)
        ranks = [stack.a.shape[1] for stacks in self._stacks for stack in stacks if stack]
        device = self.weights.base.device
        chunks = self._chunks = make_chunks(counts, columns, max(ranks, default=0), device)

        def placed(base: JoinedLinear, stack: JoinedStack | None) -> _Linear:
            if stack is None:
                return _Linear(base.weight, base.bias)
            a = chunks.per_chunk(stack.a).transpose(1, 2)
            blocks = stack.blocks(chunks.count * chunks.rows * columns)
            chunk_blocks = tuple(block._replace(b=chunks.per_chunk(block.b)) for block in blocks)
            return _Linear(base.weight, base.bias, a, chunk_blocks)

        self._linears = [
            [placed(base, stack) for base, stack in zip(layer.linears(), stacks, strict=True)]
            for layer, stacks in zip(self.weights.layers, self._stacks, strict=True)
        ]
