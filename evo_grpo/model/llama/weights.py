"""Joins linear layers of the Llama family, for fast decoding and learning.

q, k and v become one matmul, and gate and up another; parameters become views of joined buffers.
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
from evo_grpo.model.llama.families import ALL_LAYERS, Description, Family, describe
from evo_grpo.model.quantized import is_quantized


def is_llama_family(base: SharedBase) -> bool:
    """Return whether a model's type is one of `families`, with weights that are not quantised.

    `departures.can_join_layers` checks whether its modules compute what the joined layers compute.
    """
    if describe(base.model.config) is None:
        return False
    if "quantised" not in base.derived:
        base.derived["quantised"] = any(is_quantized(module) for module in base.trunk.modules())
    return not base.derived["quantised"]


@dataclass
class JoinedLinear:
    """Linear layers with the same input, concatenated.

    Attributes:
        names: Module names of the parts, as in `FusedForward.layers`.
        sizes: Output features of each part.
        weight: (sum of sizes, in), of which the parts are views.
        bias: (sum of sizes,) or None.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    weight: Tensor
    bias: Tensor | None

    def serves(self, modules: Iterator[nn.Module]) -> bool:
        """Return whether the next modules' parameters are still views of `weight` and `bias`."""
        linears = [plain(next(modules)) for _ in self.sizes]
        if (self.bias is None) != (linears[0].bias is None):
            return False
        biases = [] if self.bias is None else [linear.bias for linear in linears]
        return _begins(self.weight, [linear.weight for linear in linears]) and (
            self.bias is None or _begins(self.bias, biases)
        )


@dataclass(frozen=True)
class Norm:
    """A norm of the model: x / sqrt(mean(x^2) + eps) times its factor.

    Attributes:
        one_plus: Whether the factor is 1 + weight.
        rounds_once: Whether results are rounded to half precision only after multiplying by the
            factor.
    """

    module: Any
    one_plus: bool = False
    rounds_once: bool = False

    @classmethod
    def of(cls, module: Any, family: Family) -> Norm:  # noqa: ANN401 -- a norm of the family
        """Describe a norm module of a model that belongs to `family`."""
        return cls(module, family.one_plus, family.rounds_once)

    @property
    def weight(self) -> Tensor:
        """The factor (H,): weight, or 1 + weight in fp32 as in transformers."""
        weight: Tensor = self.module.weight
        return 1.0 + weight.float() if self.one_plus else weight

    @property
    def eps(self) -> float:
        """The number added to the mean square."""
        fields = vars(self.module)
        return float(fields["variance_epsilon"] if "variance_epsilon" in fields else fields["eps"])


@dataclass
class JoinedLayer:
    """A decoder layer with joined linear layers.

    Attributes:
        norms: Norms before and after the attention, before and after the MLP; None if missing.
        head_norms: Norms of q and k; empty if missing.
        out: Output projection of the attention; `down` is the output projection of the MLP.
        gate_up: Gate and up projections of the MLP.
    """

    norms: tuple[Norm | None, ...]
    head_norms: tuple[Norm, ...]
    qkv: JoinedLinear
    out: JoinedLinear
    gate_up: JoinedLinear
    down: JoinedLinear

    def linears(self) -> tuple[JoinedLinear, JoinedLinear, JoinedLinear, JoinedLinear]:
        """Return the four groups of linear layers, in the order of the forward."""
        return self.qkv, self.out, self.gate_up, self.down

    @classmethod
    def join(
        cls,
        layer: Any,  # noqa: ANN401 -- a decoder layer of the family
        family: Family,
        names: Mapping[int, str],
        *,
        in_place: bool,
    ) -> JoinedLayer:
        """Join the linear layers of a decoder layer; `names` maps a module's id to its name.

        With `in_place`, parameters become views of the joined weights; else the joined weights are
        copies.
        """
        q, k, v, o, gate, up, down = linears_of(layer)
        norms = norms_of(layer, family)
        head_norms = head_norms_of(layer, family)
        return cls(
            tuple(None if norm is None else Norm.of(norm, family) for norm in norms),
            tuple(Norm.of(norm, family) for norm in head_norms),
            *(_join(group, names, in_place) for group in ([q, k, v], [o], [gate, up], [down])),
        )

    def serves(self, layer: Any, family: Family) -> bool:  # noqa: ANN401 -- as above
        """Return whether a decoder layer still has the norms and weights of this `JoinedLayer`."""
        norms = (*self.norms, *self.head_norms)
        present = (*norms_of(layer, family), *head_norms_of(layer, family))
        if any((n and n.module) is not module for n, module in zip(norms, present, strict=True)):
            return False
        linears = iter(linears_of(layer))
        return all(group.serves(linears) for group in self.linears())


class LlamaWeights:
    """Joined weights of a base of the Llama family; built once and shared by all forwards."""

    def __init__(self, base: SharedBase, adapted: Mapping[str, LoraLayer]) -> None:
        description = describe(base.model.config)
        assert description is not None, "the base is of no family"
        self.base = base
        self.description: Description = description
        self.adapted = frozenset(adapted)
        self.embed: nn.Module = base.model.get_input_embeddings()
        self.norm = Norm.of(base.trunk.norm, description.family)
        self._names = {id(module): name for name, module in adapted.items()}

    @cached_property
    def layers(self) -> list[JoinedLayer]:
        """The joined decoder layers; the first access joins their weights in place."""
        family = self.description.family
        return [
            JoinedLayer.join(x, family, self._names, in_place=True) for x in layers_of(self.base)
        ]

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype of the layers; a head may have another."""
        return self.layers[0].qkv.weight.dtype

    @classmethod
    def of(cls, base: SharedBase, adapted: Mapping[str, LoraLayer]) -> LlamaWeights:
        """Return the joined weights of a base; join them again only after a change."""
        weights = base.derived.get("llama")
        if not isinstance(weights, cls) or not weights._serves(adapted):
            weights = None
            base.derived.pop("llama", None)  # free the old copy before making a new one
            weights = base.derived["llama"] = cls(base, adapted)
        return weights

    def _serves(self, adapted: Mapping[str, LoraLayer]) -> bool:
        """Return whether the model still has these weights and adapted layers."""
        layers = layers_of(self.base)
        return (
            self.adapted == frozenset(adapted)
            and self.description == describe(self.base.model.config)
            and self.embed is self.base.model.get_input_embeddings()
            and self.norm.module is self.base.trunk.norm
            and len(self.layers) == len(layers)
            and all(
                joined.serves(layer, self.description.family)
                for joined, layer in zip(self.layers, layers, strict=True)
            )
        )

    def embedded(self, ids: Tensor) -> Tensor:
        """Return the embeddings (..., H) of ids (...), the input of the first layer."""
        x: Tensor = self.embed(ids)
        factor = self.description.embedding_multiplier
        return x if factor == 1.0 else x * factor

    def rotary(
        self, length: int, like: Tensor, table: str | None = ALL_LAYERS
    ) -> tuple[Tensor, Tensor | None]:
        """Return cos and sin (length, head_dim) by the model's own rotary embedding.

        The first half of sin is negated. Without rotary positions, cos is 1 and sin None.
        """
        if table is None:
            return like.new_ones(length, self.description.head_dim), None
        trunk: Any = self.base.trunk
        positions = torch.arange(length, device=like.device)[None]
        keywords = {} if table == ALL_LAYERS else {"layer_type": table}
        cos, sin = (part.to(like.dtype) for part in trunk.rotary_emb(like, positions, **keywords))
        half = self.description.head_dim // 2
        return cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)


def layers_of(base: SharedBase) -> list[Any]:
    """Return the decoder layers of a model of the family."""
    return list(base.trunk.layers)  # pyright: ignore[reportArgumentType] -- a ModuleList by its family


def norms_of(layer: Any, family: Family) -> tuple[Any, ...]:  # noqa: ANN401 -- a decoder layer of the family
    """Return the norms of a layer in the order of `Family.norms`; None for a missing norm."""
    return tuple(getattr(layer, name) if name else None for name in family.norms)


def head_norms_of(layer: Any, family: Family) -> tuple[Any, ...]:  # noqa: ANN401 -- a decoder layer of the family
    """Return the norms of q and k; empty if the layer has none."""
    attention = layer.self_attn
    return (attention.q_norm, attention.k_norm) if family.head_norms else ()


def linears_of(layer: Any) -> tuple[Any, ...]:  # noqa: ANN401 -- a decoder layer of the family
    """Return a layer's linear layers q, k, v, out, gate, up and down, adapted or not."""
    a, m = layer.self_attn, layer.mlp
    return a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj


def plain(module: nn.Module) -> Any:  # noqa: ANN401 -- a linear layer of the family
    """Return a linear layer without its adapters."""
    # The plain case first: each step calls this for every layer.
    if type(module) is nn.Linear or not isinstance(module, LoraLayer):
        return module
    return module.base_layer


@torch.no_grad()
def _join(modules: list[nn.Module], names: Mapping[int, str], in_place: bool) -> JoinedLinear:
    linears = [plain(module) for module in modules]
    sizes = tuple(linear.weight.shape[0] for linear in linears)
    # A layer without adapters gets a name that no adapter has.
    part_names = tuple(names.get(id(module), f"{id(module)}") for module in modules)
    if len(linears) == 1:
        return JoinedLinear(part_names, sizes, linears[0].weight, linears[0].bias)
    weight = _concatenated([linear.weight for linear in linears], in_place)
    bias = None
    if any(linear.bias is not None for linear in linears):
        bias = _concatenated([linear.bias for linear in linears], in_place)
    return JoinedLinear(part_names, sizes, weight, bias)


def _concatenated(parts: Sequence[Tensor], in_place: bool) -> Tensor:
    """Concatenate parameters along axis 0; `in_place` makes them views of the result."""
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
    """Return whether the memory of a tensor begins with the parts, in order."""
    address = joined.data_ptr()
    for part in parts:
        if part.data_ptr() != address or part.dtype != joined.dtype or not part.is_contiguous():
            return False
        address += part.numel() * part.element_size()
    return True
