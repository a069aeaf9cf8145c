"""Decoding for the Llama family: the same weights with a third of the operations.

Savings, measured on small models, where overhead dominates: joined linear layers (see
`evo_grpo.model.llama.weights`), whose residual is added by the matmul itself; a cache made for one
query per row (see `evo_grpo.model.llama.cache`); rotary tables looked up once per step. Numbers
agree with the modules' own forward to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from evo_grpo.model.forward.chunks import Chunks, make_chunks
from evo_grpo.model.forward.fused import FusedForward
from evo_grpo.model.forward.stacks import build_stack
from evo_grpo.model.llama.blocks import Block, JoinedStack
from evo_grpo.model.llama.cache import KeyValues, cache_for
from evo_grpo.model.llama.kernels import rotate
from evo_grpo.model.llama.weights import JoinedLinear, LlamaWeights


@dataclass(frozen=True)
class _Linear:
    """Joined base layers with the adapters of the present rows."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None = None
    blocks: tuple[Block, ...] = ()


class _Norm:
    """A norm of the model in few operations, as overhead dominates when few rows are decoded.

    On a CPU four: x / hypot(|x|, sqrt(H eps)) * (sqrt(H) w) is x / sqrt(mean(x^2) + eps) * w. On
    other devices torch has one, which rounds once, after the weight.
    """

    def __init__(self, module: Any, *, compiled: bool) -> None:  # noqa: ANN401 -- of the family
        self.module = module
        weight: Tensor = module.weight
        self.fused = not compiled and weight.device.type != "cpu"
        # transformers normalizes in fp32 whatever the dtype, and rounds before the weight.
        self.plain = compiled or weight.dtype != torch.float32
        if not self.fused and not self.plain:
            size = weight.shape[0]
            self.weight = weight * size**0.5
            self.least = weight.new_tensor((size * float(module.variance_epsilon)) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        if self.fused:
            weight, eps = self.module.weight, self.module.variance_epsilon
            return nn.functional.rms_norm(x, weight.shape, weight, eps)
        if self.plain:
            return self.module(x)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.div(torch.hypot(length, self.least)).mul_(self.weight)


@final
class LlamaDecoder:
    """One rollout over `LlamaWeights` with the active adapters; see `Decoder`.

    `columns` is the longest prompt plus completion, for the rotary tables; `cache` is an empty one,
    None for that of the device.
    """

    def __init__(
        self,
        weights: LlamaWeights,
        fused: FusedForward,
        columns: int,
        cache: KeyValues | None = None,
    ) -> None:
        self.weights = weights
        self.fused = fused
        probe = weights.embed(torch.zeros(1, 1, dtype=torch.long, device=weights.base.device))
        self.cos, self.sin = weights.rotary(columns, probe)
        self.cache = cache or cache_for(weights.base.device, weights.head_dim**-0.5)
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
            self.cache.append(k, v)
            # Prompts are padded on the right, where causal attention never looks.
            mixed = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=w.heads != w.kv_heads
            )
            mixed = mixed.transpose(1, 2).reshape(rows, columns, -1)
            x = self._rest(linears, norm_out, x, mixed)
        last = x[torch.arange(rows, device=x.device), lengths - 1]
        return self._last_norm(last)

    def expand(self, source: Tensor, columns: int, mask: Tensor) -> None:
        """Expand prompt rows to completion rows; see `Decoder`."""
        self.cache.expand(source, columns, mask)
        self._chunks = None

    def keep(self, rows: Tensor) -> None:
        """Drop rows; see `Decoder`."""
        self.cache.keep(rows)
        self._chunks = None

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
        x: Tensor = w.embed(tokens)
        cos = self.cos.index_select(0, positions)[:, None]
        sin = self.sin.index_select(0, positions)[:, None]
        self.cache.begin()
        layers = zip(self._linears, self._norms, strict=True)
        for number, (linears, (norm_in, norm_out)) in enumerate(layers):
            parts = self._linear(linears[0], norm_in(x)).view(rows, -1, w.head_dim)
            turned = rotate(parts[:, : w.heads + w.kv_heads], cos, sin)
            q, k = turned.split((w.heads, w.kv_heads), dim=1)
            mixed = self.cache.attend(number, q, k, parts[:, w.heads + w.kv_heads :])
            x = self._rest(linears, norm_out, x, mixed)
        return self._last_norm(x)

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
        if linear.a is not None:
            assert self._chunks is not None
            low = torch.bmm(self._chunks.split(x), linear.a)
            for rows, columns, b in linear.blocks:
                self._chunks.add_product(y[..., columns], low[..., rows], b)
        return y

    def _prepare(self, columns: int) -> None:
        """Arrange the adapters for the present rows, with `columns` tokens each."""
        counts = self.fused.layout.counts_of(self._adapters)
        ranks = [stack.a.shape[1] for stacks in self._stacks for stack in stacks if stack]
        device = self.weights.base.device
        chunks = self._chunks = make_chunks(counts, columns, max(ranks, default=0), device)

        def placed(base: JoinedLinear, stack: JoinedStack | None) -> _Linear:
            if stack is None:
                return _Linear(base.weight, base.bias)
            a = chunks.per_chunk(stack.a).transpose(1, 2)
            blocks = stack.blocks(chunks.count * chunks.rows * columns)
            own = tuple(block._replace(b=chunks.per_chunk(block.b)) for block in blocks)
            return _Linear(base.weight, base.bias, a, own)

        self._linears = [
            [placed(base, stack) for base, stack in zip(layer.linears(), stacks, strict=True)]
            for layer, stacks in zip(self.weights.layers, self._stacks, strict=True)
        ]

    def _stack(self, base: JoinedLinear, dtype: torch.dtype) -> JoinedStack | None:
        layers = self.fused.layers
        parts = [
            build_stack(layers[name], self._adapters, dtype) if self.fused.adapts(name) else None
            for name in base.names
        ]
        return JoinedStack.of(parts, base.sizes)
