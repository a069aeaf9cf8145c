"""A lean decoder for the Llama family: the model's own weights, a third of its operations.

What it saves, measured on small models where overhead rules: q, k and v as one matmul, gate and up
as one, each with one pair of batched LoRA matmuls (block-diagonal B); keys kept transposed, so that
one query attends by two plain batched matmuls, with scale and mask inside the first; rotary tables
looked up once per step. The weights are not copied: the modules' parameters become views of the
joined buffers. Numbers agree with the modules' own forward to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from evo_grpo.model.base import SharedBase
from evo_grpo.model.fused import FusedForward
from evo_grpo.model.stacks import Stack

#: transformers' model types whose layers are norm, rotary attention, norm, gated MLP, and no more.
MODEL_TYPES = frozenset({"llama", "mistral", "qwen2"})


def is_supported(base: SharedBase) -> bool:
    """Return whether a model is of this family, with plain linear layers and no sliding window."""
    config = base.model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config.model_type not in MODEL_TYPES or kinds != {"full_attention"}:
        return False
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return False
    if config.hidden_act not in ("silu", "swish"):
        return False
    return all(type(_plain(m)) is nn.Linear for layer in _layers(base) for m in _linears(layer))


@dataclass
class Joined:
    """Linear layers of one input, side by side.

    Attributes:
        names: Module names of the parts, as in `FusedForward.layers`.
        sizes: Output features of each part.
        weight: (sum of sizes, in), the parts' own storage.
        bias: (sum of sizes,) or None.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    weight: Tensor
    bias: Tensor | None


@dataclass
class _Layer:
    norm_in: nn.Module
    norm_out: nn.Module
    qkv: Joined
    out: Joined
    gate_up: Joined
    down: Joined


class LlamaWeights:
    """A model's layers with joined weights; built once per base, shared by all rollouts.

    Args:
        base: A base that `is_supported`.
        adapted: Its LoRA layers by name, as the population forward knows them.
    """

    def __init__(self, base: SharedBase, adapted: Mapping[str, LoraLayer]) -> None:
        """Join the weights in place; see the module docstring."""
        config = base.model.config
        self.base = base
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or self.heads)
        size = getattr(config, "head_dim", None)
        self.head_dim = int(size or config.hidden_size // self.heads)
        self.adapted = frozenset(adapted)
        names = {id(module): name for name, module in adapted.items()}
        self.layers: list[_Layer] = []
        for layer in _layers(base):
            q, k, v, o, gate, up, down = _linears(layer)
            self.layers.append(
                _Layer(
                    norm_in=layer.input_layernorm,
                    norm_out=layer.post_attention_layernorm,
                    qkv=_join([q, k, v], names),
                    out=_join([o], names),
                    gate_up=_join([gate, up], names),
                    down=_join([down], names),
                )
            )

    def rotary(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin (length, head_dim) of the model's own rotary embedding.

        The first half of sin is negated, for rotating by swapping halves.
        """
        trunk: Any = self.base.trunk
        positions = torch.arange(length, device=like.device)[None]
        cos, sin = trunk.rotary_emb(like, position_ids=positions)
        half = self.head_dim // 2
        return cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)


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
        self.embed: nn.Module = weights.base.model.get_input_embeddings()
        self.norm: Any = weights.base.trunk.norm
        probe = self.embed(torch.zeros(1, 1, dtype=torch.long, device=weights.base.device))
        self.cos, self.sin = weights.rotary(columns, probe)
        self.scale = weights.head_dim**-0.5
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.used = 0
        self._joined: dict[tuple[str, ...], Stack | None] = {}

    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Run prompts (NP, Tp); see `Decoder`."""
        rows, columns = ids.shape
        x: Tensor = self.embed(ids)
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
        return self.norm(last)

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
        x: Tensor = self.embed(tokens)
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
        return self.norm(x)

    def _qkv(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
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

    def _rest(self, layer: _Layer, x: Tensor, mixed: Tensor) -> Tensor:
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
            self._joined[joined.names] = _block_diagonal(parts, joined.sizes)
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


def _block_diagonal(parts: list[Stack | None], sizes: tuple[int, ...]) -> Stack | None:
    """Join adapters of parallel layers: A stacked along the rank, B block-diagonal."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    if len(parts) == 1:
        return known[0]
    agents = known[0].a.shape[0]
    ranks = sum(part.a.shape[1] for part in known)
    b = known[0].b.new_zeros(agents, ranks, sum(sizes))
    row = column = 0
    for part, size in zip(parts, sizes, strict=True):
        if part is not None:
            b[:, row : row + part.b.shape[1], column : column + size] = part.b
            row += part.b.shape[1]
        column += size
    return Stack(torch.cat([part.a for part in known], dim=1), b)


def _layers(base: SharedBase) -> list[Any]:
    return list(base.trunk.layers)  # pyright: ignore[reportArgumentType] -- a ModuleList by its family


def _linears(layer: Any) -> tuple[Any, ...]:  # noqa: ANN401 -- a decoder layer of the family
    a, m = layer.self_attn, layer.mlp
    return a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj


def _plain(module: nn.Module) -> nn.Module:
    return module.get_base_layer() if isinstance(module, LoraLayer) else module


@torch.no_grad()
def _join(modules: list[nn.Module], names: dict[int, str]) -> Joined:
    linears: list[Any] = [_plain(module) for module in modules]
    sizes = tuple(linear.weight.shape[0] for linear in linears)
    # A layer without adapters has no name, and `FusedForward.adapts` says no to it.
    own = tuple(names.get(id(module), f"{id(module)}") for module in modules)
    if len(linears) == 1:
        return Joined(own, sizes, linears[0].weight, linears[0].bias)
    weight = torch.cat([linear.weight for linear in linears])
    bias = None
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias for linear in linears])
    start = 0
    for linear, size in zip(linears, sizes, strict=True):
        # The parameter becomes a view: one copy of the weights, whoever reads them.
        linear.weight.data = weight[start : start + size]
        if bias is not None:
            linear.bias.data = bias[start : start + size]
        start += size
    return Joined(own, sizes, weight, bias)
