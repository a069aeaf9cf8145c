"""A lean decoder for the Llama family: the model's own weights, a third of its operations.

What it saves, measured on small models where overhead rules: joined linear layers (see
`evo_grpo.model.llama`); keys kept transposed, so that one query attends by two plain batched
matmuls, with scale and mask inside the first; rotary tables looked up once per step. Numbers agree
with the modules' own forward to rounding.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from evo_grpo.model.fused import FusedForward
from evo_grpo.model.llama import Joined, JoinedLayer, LlamaWeights, block_diagonal
from evo_grpo.model.stacks import Stack


@final
class LlamaDecoder:
    """One rollout over `LlamaWeights`; see `Decoder`.

    Args:
        weights: The model.
        fused: The adapters in force.
        columns: Longest prompt plus completion, for the rotary tables.
    """

    def __init__(self, weights: LlamaWeights, fused: FusedForward, columns: int) -> None:
        """Make the rotary tables; the cache is made by `prefill`."""
        self.weights = weights
        self.fused = fused
        probe = weights.embed(torch.zeros(1, 1, dtype=torch.long, device=weights.base.device))
        self.cos, self.sin = weights.rotary(columns, probe)
        self.scale = weights.head_dim**-0.5
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.used = 0
        self._joined: dict[tuple[str, ...], Stack | None] = {}

    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Run prompts (NP, Tp); see `Decoder`."""
        rows, columns = ids.shape
        x: Tensor = self.weights.embed(ids)
        cos, sin = self.cos[:columns, None], self.sin[:columns, None]
        for layer in self.weights.layers:
            q, k, v = self._qkv(layer, x, cos, sin)
            # (NP, heads, T, D) for the attention, keys kept transposed for the decode steps.
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            self.keys.append(k.transpose(2, 3))
            self.values.append(v)
            # Prompts are padded on the right, which causal attention never looks at.
            mixed = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.weights.heads != self.weights.kv_heads
            )
            x = self._rest(layer, x, mixed.transpose(1, 2).reshape(rows, columns, -1))
        self.used = columns
        last = x[torch.arange(rows, device=x.device), lengths - 1]
        return self.weights.norm(last)

    def expand(self, source: Tensor, columns: int) -> None:
        """Turn prompt rows into completion rows; see `Decoder`."""
        self._move(source, columns)

    def keep(self, rows: Tensor) -> None:
        """Drop rows; see `Decoder`."""
        # Adapters may have left with their rows, so joined stacks are built again.
        self._joined.clear()
        self._move(rows, self.keys[0].shape[-1])

    def step(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Run one token per row; see `Decoder`."""
        w = self.weights
        rows = tokens.shape[0]
        x: Tensor = self.weights.embed(tokens)
        cos = self.cos.index_select(0, positions)[:, None]
        sin = self.sin.index_select(0, positions)[:, None]
        column, self.used = self.used, self.used + 1
        # (B * kv, 1, C): added inside the attention's first matmul.
        hidden = torch.zeros(mask.shape, dtype=x.dtype, device=x.device)
        hidden.masked_fill_(~mask, float("-inf"))
        bias = hidden[:, 0].expand(rows, w.kv_heads, -1).reshape(rows * w.kv_heads, 1, -1)
        for layer, keys, values in zip(w.layers, self.keys, self.values, strict=True):
            q, k, v = self._qkv(layer, x, cos, sin)
            keys[..., column] = k
            values[:, :, column] = v
            shape = (rows * w.kv_heads, w.heads // w.kv_heads, w.head_dim)
            past_k = keys.flatten(0, 1)[..., : self.used]
            past_v = values.flatten(0, 1)[:, : self.used]
            scores = torch.baddbmm(bias, q.reshape(shape), past_k, alpha=self.scale)
            mixed = torch.bmm(torch.softmax(scores, dim=-1), past_v)
            x = self._rest(layer, x, mixed.view(rows, -1))
        return self.weights.norm(x)

    def _qkv(self, layer: JoinedLayer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Return rotated queries, rotated keys and values, each (..., heads, D)."""
        w = self.weights
        both = (w.heads + w.kv_heads) * w.head_dim
        projected = self._linear(layer.qkv, layer.norm_in(x))
        turned = projected[..., :both].unflatten(-1, (-1, w.head_dim))
        half = w.head_dim // 2
        swapped = torch.cat([turned[..., half:], turned[..., :half]], dim=-1)
        turned = torch.addcmul(turned * cos, swapped, sin)
        values = projected[..., both:].unflatten(-1, (w.kv_heads, w.head_dim))
        return turned[..., : w.heads, :], turned[..., w.heads :, :], values

    def _rest(self, layer: JoinedLayer, x: Tensor, mixed: Tensor) -> Tensor:
        """Output projection, residual, norm, MLP, residual."""
        x = x + self._linear(layer.out, mixed)
        inner = self._linear(layer.gate_up, layer.norm_out(x))
        gate, up = inner.chunk(2, dim=-1)
        return x + self._linear(layer.down, nn.functional.silu(gate).mul_(up))

    def _linear(self, joined: Joined, x: Tensor) -> Tensor:
        """Joined base layers plus every agent's adapter on its own rows."""
        result = nn.functional.linear(x, joined.weight, joined.bias)
        stack = self._stack(joined, x.dtype)
        return result if stack is None else self.fused.add(x, result, stack)

    def _stack(self, joined: Joined, dtype: torch.dtype) -> Stack | None:
        if joined.names not in self._joined:
            parts = [
                self.fused.stack(name, dtype) if self.fused.adapts(name) else None
                for name in joined.names
            ]
            self._joined[joined.names] = block_diagonal(parts, joined.sizes)
        return self._joined[joined.names]

    def _move(self, rows: Tensor, columns: int) -> None:
        """Take rows (with repeats) into buffers of `columns` columns, one layer at a time."""
        used = self.used
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            count, heads, size = rows.shape[0], keys.shape[1], keys.shape[2]
            new_keys = keys.new_empty(count, heads, size, columns)
            new_keys[..., :used] = keys[..., :used].index_select(0, rows)
            new_values = values.new_empty(count, heads, columns, size)
            new_values[:, :, :used] = values[:, :, :used].index_select(0, rows)
            self.keys[i], self.values[i] = new_keys, new_values
