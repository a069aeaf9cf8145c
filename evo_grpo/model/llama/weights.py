"""The layers of the Llama family with their linear layers joined: what decodes and learns fastest.

q, k and v are one matmul, and so are gate and up, each with one pair of batched LoRA matmuls whose
B is block-diagonal. The weights are not copied: the modules' parameters become views of the joined
buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.stacks import Stack

#: transformers' model types whose layers are norm, rotary attention, norm, gated MLP, and no more.
MODEL_TYPES = frozenset({"llama", "mistral", "qwen2"})


def is_llama_family(base: SharedBase) -> bool:
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
class JoinedLinear:
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
class JoinedLayer:
    """One decoder layer."""

    norm_in: nn.Module
    norm_out: nn.Module
    qkv: JoinedLinear
    out: JoinedLinear
    gate_up: JoinedLinear
    down: JoinedLinear

    def linears(self) -> tuple[JoinedLinear, JoinedLinear, JoinedLinear, JoinedLinear]:
        """Return the four groups of linear layers, in the order of the forward."""
        return self.qkv, self.out, self.gate_up, self.down


class LlamaWeights:
    """A model's layers with joined weights; built once per base, shared by all that run it.

    Args:
        base: A base that `is_llama_family`.
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
        self.embed: nn.Module = base.model.get_input_embeddings()
        self.norm: Any = base.trunk.norm
        names = {id(module): name for name, module in adapted.items()}
        self.layers: list[JoinedLayer] = []
        for layer in _layers(base):
            q, k, v, o, gate, up, down = _linears(layer)
            self.layers.append(
                JoinedLayer(
                    norm_in=layer.input_layernorm,
                    norm_out=layer.post_attention_layernorm,
                    qkv=_join([q, k, v], names),
                    out=_join([o], names),
                    gate_up=_join([gate, up], names),
                    down=_join([down], names),
                )
            )

    @classmethod
    def of(cls, base: SharedBase, adapted: Mapping[str, LoraLayer]) -> LlamaWeights:
        """Return the joined weights of a base, made once.

        A slot of another configuration can wrap further layers; then they are joined again.
        """
        known = base.derived.get("llama")
        if not isinstance(known, cls) or known.adapted != frozenset(adapted):
            known = base.derived["llama"] = cls(base, adapted)
        return known

    def rotary(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin (length, head_dim) of the model's own rotary embedding.

        The first half of sin is negated, for rotating by swapping halves.
        """
        trunk: Any = self.base.trunk
        positions = torch.arange(length, device=like.device)[None]
        cos, sin = trunk.rotary_emb(like, position_ids=positions)
        half = self.head_dim // 2
        return cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)


def block_diagonal(parts: list[Stack | None], sizes: tuple[int, ...]) -> Stack | None:
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
def _join(modules: list[nn.Module], names: dict[int, str]) -> JoinedLinear:
    linears: list[Any] = [_plain(module) for module in modules]
    sizes = tuple(linear.weight.shape[0] for linear in linears)
    # A layer without adapters has no name that `FusedForward.adapts` knows.
    own = tuple(names.get(id(module), f"{id(module)}") for module in modules)
    if len(linears) == 1:
        return JoinedLinear(own, sizes, linears[0].weight, linears[0].bias)
    weight = torch.cat([linear.weight for linear in linears])
    bias = None
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias for linear in linears])
    start = 0
    for linear, size in zip(linears, sizes, strict=True):
        # The parameter becomes a view: there is one copy of the weights.
        linear.weight.data = weight[start : start + size]
        if bias is not None:
            linear.bias.data = bias[start : start + size]
        start += size
    return JoinedLinear(own, sizes, weight, bias)
