"""The layers of the Llama family with joined linear layers, for fast decoding and learning.

q, k and v are one matmul, and so are gate and up. The weights are not copied: the modules'
parameters become views of the joined buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from evo_grpo.model.base import SharedBase
from evo_grpo.model.quantized import is_quantized

#: Model types of transformers whose layers consist of norm, rotary attention, norm and gated MLP,
#: with the prefixes of their class names.
MODEL_TYPES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}


def is_llama_family(base: SharedBase) -> bool:
    """Return whether a model's type is of this family, unquantised and without a sliding window.

    `takes_fast_path` in `evo_grpo.model.llama.choice` checks whether it also computes the same.
    """
    config = base.model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config.model_type not in MODEL_TYPES or kinds != {"full_attention"}:
        return False
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return False
    if config.hidden_act not in ("silu", "swish"):
        return False
    if "quantised" not in base.derived:
        base.derived["quantised"] = any(is_quantized(module) for module in base.trunk.modules())
    return not base.derived["quantised"]


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

    def serves(self, modules: Iterator[nn.Module]) -> bool:
        """Return whether the weights of these linear layers are still views of this tensor."""
        linears = [plain(next(modules)) for _ in self.sizes]
        if (self.bias is None) != (linears[0].bias is None):
            return False
        biases = [] if self.bias is None else [linear.bias for linear in linears]
        return _begins(self.weight, [linear.weight for linear in linears]) and (
            self.bias is None or _begins(self.bias, biases)
        )


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

    @classmethod
    def join(cls, layer: Any, names: Mapping[int, str], *, in_place: bool) -> JoinedLayer:  # noqa: ANN401 -- a decoder layer of the family
        """Join the linear layers of a decoder layer.

        `names` are those of linear layers by their id, as the population forward has them. In
        place, the parameters become views of the joined weights; else these are copies.
        """
        q, k, v, o, gate, up, down = linears_of(layer)
        return cls(
            layer.input_layernorm,
            layer.post_attention_layernorm,
            *(_join(group, names, in_place) for group in ([q, k, v], [o], [gate, up], [down])),
        )

    def serves(self, layer: Any) -> bool:  # noqa: ANN401 -- as above
        """Return whether the modules and the memory of the weights are unchanged."""
        if self.norm_in is not layer.input_layernorm:
            return False
        if self.norm_out is not layer.post_attention_layernorm:
            return False
        linears = iter(linears_of(layer))
        return all(group.serves(linears) for group in self.linears())


class LlamaWeights:
    """Joined weights of a base of the Llama family; built once and shared by all forwards."""

    def __init__(self, base: SharedBase, adapted: Mapping[str, LoraLayer]) -> None:
        config = base.model.config
        self.base = base
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or self.heads)
        size = getattr(config, "head_dim", None)
        self.head_dim = int(size or config.hidden_size // self.heads)
        self.adapted = frozenset(adapted)
        self.embed: nn.Module = base.model.get_input_embeddings()
        self.norm: Any = base.trunk.norm
        self._names = {id(module): name for name, module in adapted.items()}

    @cached_property
    def layers(self) -> list[JoinedLayer]:
        """The layers; the first access joins their weights in place."""
        return [JoinedLayer.join(x, self._names, in_place=True) for x in layers_of(self.base)]

    @classmethod
    def of(cls, base: SharedBase, adapted: Mapping[str, LoraLayer]) -> LlamaWeights:
        """Return the joined weights of a base, made once.

        A slot of another configuration can wrap further layers, and weights can be replaced or
        moved; then they are joined again.
        """
        known = base.derived.get("llama")
        if not isinstance(known, cls) or not known._serves(adapted):
            known = None
            base.derived.pop("llama", None)  # free the old copy before making a new one
            known = base.derived["llama"] = cls(base, adapted)
        return known

    def _serves(self, adapted: Mapping[str, LoraLayer]) -> bool:
        """Return whether the model still has these weights and adapted layers."""
        layers = layers_of(self.base)
        return (
            self.adapted == frozenset(adapted)
            and self.embed is self.base.model.get_input_embeddings()
            and self.norm is self.base.trunk.norm
            and len(self.layers) == len(layers)
            and all(joined.serves(layer) for joined, layer in zip(self.layers, layers, strict=True))
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


def layers_of(base: SharedBase) -> list[Any]:
    """Return the decoder layers of a model of the family."""
    return list(base.trunk.layers)  # pyright: ignore[reportArgumentType] -- a ModuleList by its family


def linears_of(layer: Any) -> tuple[Any, ...]:  # noqa: ANN401 -- a decoder layer of the family
    """Return q, k, v, out, gate, up and down, adapted or not."""
    a, m = layer.self_attn, layer.mlp
    return a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj


def plain(module: nn.Module) -> Any:  # noqa: ANN401 -- a linear layer of the family
    """Return a linear layer without its adapters."""
    # The plain case first, since each step asks this of every layer.
    if type(module) is nn.Linear or not isinstance(module, LoraLayer):
        return module
    return module.base_layer


@torch.no_grad()
def _join(modules: list[nn.Module], names: Mapping[int, str], in_place: bool) -> JoinedLinear:
    linears = [plain(module) for module in modules]
    sizes = tuple(linear.weight.shape[0] for linear in linears)
    # A layer without adapters has no name that `FusedForward.adapts` knows.
    own = tuple(names.get(id(module), f"{id(module)}") for module in modules)
    if len(linears) == 1:
        return JoinedLinear(own, sizes, linears[0].weight, linears[0].bias)
    weight = _side_by_side([linear.weight for linear in linears], in_place)
    bias = None
    if linears[0].bias is not None:
        bias = _side_by_side([linear.bias for linear in linears], in_place)
    return JoinedLinear(own, sizes, weight, bias)


def _side_by_side(parts: Sequence[Tensor], in_place: bool) -> Tensor:
    """Return parameters joined along their first axis; in place, they become views of it."""
    first = parts[0].data
    total = sum(part.shape[0] for part in parts)
    room = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    if room >= total * first.stride(0) and _begins(first, parts):
        # The parameters were joined before, for other adapters.
        return first.as_strided((total, *first.shape[1:]), first.stride())
    joined = torch.cat([part.data for part in parts])
    start = 0
    for part in parts if in_place else ():
        # The parameter becomes a view: there is one copy of the weights.
        part.data = joined[start : start + part.shape[0]]
        start += part.shape[0]
    return joined


def _begins(joined: Tensor, parts: Sequence[Tensor]) -> bool:
    """Return whether the parts are consecutive in memory from the start of a tensor."""
    place = joined.data_ptr()
    for part in parts:
        if part.data_ptr() != place or part.dtype != joined.dtype or not part.is_contiguous():
            return False
        place += part.numel() * part.element_size()
    return True
