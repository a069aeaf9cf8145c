"""Decoding for the Llama family: the same weights with a third of the operations.

Savings, measured on small models, where overhead dominates: joined linear layers (see
`evo_grpo.model.llama.weights`), whose residual is added by the matmul itself; keys kept transposed,
so that one query attends by two plain batched matmuls, with scale and mask inside the first; cache
columns taken in whole blocks, since a softmax over a ragged width is slow; rotary tables looked up
once per step. Numbers agree with the modules' own forward to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from evo_grpo.model.forward.chunks import Chunks, make_chunks
from evo_grpo.model.forward.fused import FusedForward
from evo_grpo.model.forward.stacks import Stack, build_stack
from evo_grpo.model.llama.kernels import rotate
from evo_grpo.model.llama.weights import JoinedLinear, LlamaWeights, block_diagonal

#: Cache columns come in blocks of as many numbers as a vector register holds.
_BLOCK = 16


@dataclass(frozen=True)
class _Linear:
    """Joined base layers with the adapters of the present rows."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None


class _Norm:
    """A norm of the model in only four operations, as overhead dominates when few rows are decoded.

    x / hypot(|x|, sqrt(H eps)) * (sqrt(H) w) is x / sqrt(mean(x^2) + eps) * w.
    """

    def __init__(self, module: Any, *, compiled: bool) -> None:  # noqa: ANN401 -- of the family
        self.module = module
        weight: Tensor = module.weight
        # transformers normalizes in fp32 whatever the dtype, and rounds before the weight.
        self.plain = compiled or weight.dtype != torch.float32
        size = weight.shape[0]
        self.weight = weight * size**0.5
        self.least = weight.new_tensor((size * float(module.variance_epsilon)) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        if self.plain:
            return self.module(x)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.div(torch.hypot(length, self.least)).mul_(self.weight)


@final
class LlamaDecoder:
    """One rollout over `LlamaWeights` with the active adapters; see `Decoder`.

    `columns` is the longest prompt plus completion, for the rotary tables.
    """

    def __init__(self, weights: LlamaWeights, fused: FusedForward, columns: int) -> None:
        self.weights = weights
        self.fused = fused
        probe = weights.embed(torch.zeros(1, 1, dtype=torch.long, device=weights.base.device))
        self.cos, self.sin = weights.rotary(columns, probe)
        self.scale = weights.head_dim**-0.5
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.used = 0
        self._adapters = fused.layout.adapters
        self._stacks = [
            [self._stack(base, probe.dtype) for base in layer.linears()] for layer in weights.layers
        ]
        compiled = weights.base.compiled
        self._norms = [
            (_Norm(layer.norm_in, compiled=compiled), _Norm(layer.norm_out, compiled=compiled))
            for layer in weights.layers
        ]
        self._last_norm = _Norm(weights.norm, compiled=compiled)
        self._chunks: Chunks | None = None
        self._linears: list[list[_Linear]] = []
        self._bias: Tensor | None = None

    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Run prompts (NP, Tp); see `Decoder`."""
        w = self.weights
        rows, columns = ids.shape
        self._prepare(columns)
        x: Tensor = w.embed(ids)
        cos, sin = self.cos[:columns], self.sin[:columns]
        for linears, (norm_in, norm_out) in zip(self._linears, self._norms, strict=True):
            joined = self._linear(linears[0], norm_in(x))
            q, k, v = (
                part.transpose(1, 2)
                for part in joined.unflatten(-1, (-1, w.head_dim)).split(
                    (w.heads, w.kv_heads, w.kv_heads), dim=2
                )
            )
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            # Keys are kept transposed for the decode steps.
            self.keys.append(k.transpose(2, 3))
            self.values.append(v)
            # Prompts are padded on the right, where causal attention never looks.
            mixed = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=w.heads != w.kv_heads
            )
            mixed = mixed.transpose(1, 2).reshape(rows, columns, -1)
            x = self._rest(linears, norm_out, x, mixed)
        self.used = columns
        last = x[torch.arange(rows, device=x.device), lengths - 1]
        return self._last_norm(last)

    def expand(self, source: Tensor, columns: int) -> None:
        """Expand prompt rows to completion rows; see `Decoder`."""
        self._move(source, -(-columns // _BLOCK) * _BLOCK)

    def keep(self, rows: Tensor) -> None:
        """Drop rows; see `Decoder`."""
        self._move(rows, self.keys[0].shape[-1])

    def step(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Run one token per row; see `Decoder`."""
        w = self.weights
        rows = tokens.shape[0]
        if self._chunks is None:
            self._prepare(1)
        x: Tensor = w.embed(tokens)
        cos = self.cos.index_select(0, positions)[:, None]
        sin = self.sin.index_select(0, positions)[:, None]
        column, self.used = self.used, self.used + 1
        width = -(-self.used // _BLOCK) * _BLOCK
        bias = self._attendable(mask, x.dtype)[..., :width]
        shape = (rows * w.kv_heads, w.heads // w.kv_heads, w.head_dim)
        layers = zip(self._linears, self._norms, self.keys, self.values, strict=True)
        for linears, (norm_in, norm_out), keys, values in layers:
            parts = self._linear(linears[0], norm_in(x)).view(rows, -1, w.head_dim)
            turned = rotate(parts[:, : w.heads + w.kv_heads], cos, sin)
            q = turned[:, : w.heads].reshape(shape)
            keys[..., column] = turned[:, w.heads :]
            values[:, :, column] = parts[:, w.heads + w.kv_heads :]
            scores = torch.baddbmm(bias, q, keys.flatten(0, 1)[..., :width], alpha=self.scale)
            mixed = torch.bmm(torch.softmax(scores, dim=-1), values.flatten(0, 1)[:, :width])
            x = self._rest(linears, norm_out, x, mixed.view(rows, -1))
        return self._last_norm(x)

    def _attendable(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the bias of the scores (B * kv, 1, columns): 0, or -inf for hidden columns.

        It is kept between steps: each step reveals one more column, that of its token.
        """
        if self._bias is None:
            rows, used = mask.shape[0], mask.shape[-1]
            hidden = torch.full(
                (rows, 1, self.keys[0].shape[-1]), float("-inf"), dtype=dtype, device=mask.device
            )
            hidden[..., :used].masked_fill_(mask[:, 0], 0.0)
            self._bias = hidden.repeat_interleave(self.weights.kv_heads, 0)
        self._bias[..., self.used - 1] = 0.0
        return self._bias

    def _rest(self, linears: list[_Linear], norm: _Norm, x: Tensor, mixed: Tensor) -> Tensor:
        """Output projection, residual, norm, MLP, residual; overwrites x."""
        x = self._linear(linears[1], mixed, x)
        inner = self._linear(linears[2], norm(x))
        gate, up = inner.chunk(2, dim=-1)
        return self._linear(linears[3], nn.functional.silu(gate).mul_(up), x)

    def _linear(self, linear: _Linear, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Joined base layers plus every agent's adapter on its own rows; overwrites residual."""
        if residual is None:
            y = nn.functional.linear(x, linear.weight, linear.bias)
        else:
            y = residual
            y.flatten(0, -2).addmm_(x.flatten(0, -2), linear.weight.t())
            if linear.bias is not None:
                y.add_(linear.bias)
        if linear.a is not None and linear.b is not None:
            assert self._chunks is not None
            low = torch.bmm(self._chunks.split(x), linear.a)
            self._chunks.add_product(y, low, linear.b)
        return y

    def _prepare(self, columns: int) -> None:
        """Arrange the adapters for the present rows, with `columns` tokens each."""
        counts = self.fused.layout.counts_of(self._adapters)
        ranks = [stack.a.shape[1] for stacks in self._stacks for stack in stacks if stack]
        device = self.weights.base.device
        chunks = self._chunks = make_chunks(counts, columns, max(ranks, default=0), device)

        def placed(base: JoinedLinear, stack: Stack | None) -> _Linear:
            if stack is None:
                return _Linear(base.weight, base.bias, None, None)
            a, b = chunks.per_chunk(stack.a), chunks.per_chunk(stack.b)
            return _Linear(base.weight, base.bias, a.transpose(1, 2), b)

        self._linears = [
            [placed(base, stack) for base, stack in zip(layer.linears(), stacks, strict=True)]
            for layer, stacks in zip(self.weights.layers, self._stacks, strict=True)
        ]

    def _stack(self, base: JoinedLinear, dtype: torch.dtype) -> Stack | None:
        layers = self.fused.layers
        parts = [
            build_stack(layers[name], self._adapters, dtype) if self.fused.adapts(name) else None
            for name in base.names
        ]
        return block_diagonal(parts, base.sizes)

    def _move(self, rows: Tensor, columns: int) -> None:
        """Copy rows (with repeats) into buffers of `columns` columns, one layer at a time."""
        used = self.used
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            count, heads, size = rows.shape[0], keys.shape[1], keys.shape[2]
            # Zeros: columns of a block that are not used yet are multiplied by a weight of 0.
            new_keys = keys.new_zeros(count, heads, size, columns)
            new_keys[..., :used] = keys[..., :used].index_select(0, rows)
            new_values = values.new_zeros(count, heads, columns, size)
            new_values[:, :, :used] = values[:, :, :used].index_select(0, rows)
            self.keys[i], self.values[i] = new_keys, new_values
        # Rows and adapters have changed: the next step arranges them again.
        self._chunks = self._bias = None
