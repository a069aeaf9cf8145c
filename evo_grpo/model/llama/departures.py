"""Check of a Llama-family model for modules that differ from those of transformers.

The layers of `evo_grpo.model.llama` use a model's weights and compute the same as the `families` of
transformers. A model of such a type may compute something else: it may have another
norm or activation, another `scaling`, a hook, a patched attention, or code from a hub folder. This
check inspects every module at each call, since a hook may be registered at any time, so it also
finds differences that only long rows or a cache would show. `comparison` compares the numbers,
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear as AdaptedLinear
from torch import nn
from transformers import masking_utils
from transformers.activations import ACT2FN
from transformers.integrations import sdpa_attention

from evo_grpo.model.base import SharedBase
from evo_grpo.model.llama.families import FAMILIES, describe
from evo_grpo.model.llama.weights import head_norms_of, layers_of, linears_of, norms_of, plain
from evo_grpo.model.origin import (
    class_from_libraries,
    foreign_functions,
    from_libraries,
    global_hook,
    replaced_product,
    tampered,
)

#: The classes of each activation in transformers.
_ACTIVATIONS = {
    "silu": tuple({nn.SiLU, type(ACT2FN["silu"])}),
    "gelu_tanh": (type(ACT2FN["gelu_pytorch_tanh"]),),
}


@dataclass(frozen=True)
class Departure:
    """A difference between a model and the model of transformers with the same type.

    Attributes:
        what: A clause for a sentence, such as "model.layers.3.mlp has a forward hook".
        masks: Whether masks and positions may differ too, so that a decoder must not make them.
        others: Further differences.
    """

    what: str
    masks: bool = False
    others: tuple[str, ...] = ()


class _Code(NamedTuple):
    """The code of a model type in transformers."""

    namespace: dict[str, Any]
    trunk: type
    layer: type
    attention: type
    mlp: type
    norm: type
    rotary: type
    embedding: type


def find_departure(base: SharedBase) -> Departure | None:
    """Return how a model differs from that of transformers with the same type, or None.

    The model must satisfy `is_llama_family`. It is inspected but not run, which takes a
    millisecond.
    """
    family = _family(base.model.config.model_type)
    found = tuple(_departures(base, family))
    if not found:
        return None
    masks = any(one.masks for one in found)
    return Departure(found[0].what, masks, tuple(one.what for one in found[1:]))


def _departures(base: SharedBase, family: _Code) -> Iterator[Departure]:
    yield from _of_module("model", base.trunk, (family.trunk,), masks=True)
    if type(base.trunk) is family.trunk:
        for find in (_of_code, _of_config, _of_ends, _of_layers):
            yield from find(base, family)


@cache
def _family(model_type: str) -> _Code:
    family = FAMILIES[model_type]
    name, module = family.name, family.module
    code = import_module(f"transformers.models.{module}.modeling_{module}")
    parts = (family.trunk, "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
    trunk, layer, attention, mlp, norm, rotary = (getattr(code, name + part) for part in parts)
    embedding = getattr(code, name + family.embedding) if family.embedding else nn.Embedding
    return _Code(vars(code), trunk, layer, attention, mlp, norm, rotary, embedding)


def _of_code(base: SharedBase, family: _Code) -> Iterator[Departure]:
    """Yield classes and functions of transformers that were replaced."""
    kinds = (family.trunk, family.layer, family.attention, family.mlp, family.norm, family.rotary)
    activations = (kind for kinds in _ACTIVATIONS.values() for kind in kinds)
    for kind in (*kinds, family.embedding, nn.Linear, nn.Embedding, *activations):
        if not class_from_libraries(kind):
            yield Departure(f"{kind.__module__}.{kind.__qualname__} runs other code", masks=True)
    for namespace in (family.namespace, vars(masking_utils), vars(sdpa_attention)):
        for name in foreign_functions(namespace):
            yield Departure(f"{namespace['__name__']}.{name} is replaced", masks=True)
    chosen = str(getattr(base.trunk.config, "_attn_implementation", None) or "eager")
    attentions = family.namespace["ALL_ATTENTION_FUNCTIONS"]
    eager = family.namespace["eager_attention_forward"]
    masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    for what, function in (
        ("attention", attentions.get(chosen, eager if chosen == "eager" else None)),
        ("mask of the attention", masks.get(chosen)),
    ):
        if function is None or not from_libraries(function):
            yield Departure(f"the {what} {chosen!r} is not transformers' own", masks=True)
    if name := replaced_product():
        yield Departure(f"{name} is replaced", masks=True)
    if name := global_hook():
        yield Departure(f"there is a {name}", masks=True)


def _of_config(base: SharedBase, family: _Code) -> Iterator[Departure]:
    """Yield differences in settings that the layers read from the configuration."""
    del family
    config = base.model.config
    if base.trunk.config is not config and base.trunk.config != config:
        yield Departure("model.config is not the configuration of the whole model", masks=True)
    if not getattr(config, "is_causal", True):
        yield Departure("its configuration says is_causal=False", masks=True)
    if type(base.trunk.layers) is not nn.ModuleList:
        yield Departure(f"model.layers is a {type(base.trunk.layers).__name__}", masks=True)
    layers = len(layers_of(base))
    if config.num_hidden_layers != layers:
        yield Departure(f"it has {layers} layers, and runs {config.num_hidden_layers}")


def _of_ends(base: SharedBase, family: _Code) -> Iterator[Departure]:
    trunk: Any = base.trunk
    yield from _of_module("model.embed_tokens", trunk.embed_tokens, (family.embedding,))
    yield from _of_module("model.rotary_emb", trunk.rotary_emb, (family.rotary,))
    yield from _of_module("model.norm", trunk.norm, (family.norm,))
    if base.model.get_input_embeddings() is not trunk.embed_tokens:
        yield Departure("its input embeddings are not model.embed_tokens")


def _of_layers(base: SharedBase, family: _Code) -> Iterator[Departure]:
    config = base.model.config
    d = describe(config)
    assert d is not None, "the base is of no family"
    yield from _of_values("model", base.trunk, {"embedding_multiplier": d.embedding_multiplier})
    expected = {
        "scaling": d.scale,
        "head_dim": d.head_dim,
        "num_key_value_groups": d.heads // d.kv_heads,
        "is_causal": True,
        "config": config,
    }
    # Where the model has another number of layers, `_of_config` says so.
    kinds = zip(layers_of(base), d.layers, strict=False)
    for number, (layer, kind) in enumerate(kinds):
        path = f"model.layers.{number}"
        yield from _of_module(path, layer, (family.layer,), masks=True)
        if type(layer) is not family.layer:
            continue
        yield from _of_values(path, layer, {"residual_multiplier": d.residual_multiplier})
        attention, mlp = layer.self_attn, layer.mlp
        yield from _of_module(f"{path}.self_attn", attention, (family.attention,), masks=True)
        yield from _of_module(f"{path}.mlp", mlp, (family.mlp,))
        norms = [norm for norm in norms_of(layer, d.family) if norm is not None]
        names = [name for name in d.family.norms if name]
        for name, norm in zip(names, norms, strict=True):
            yield from _of_module(f"{path}.{name}", norm, (family.norm,))
        if type(attention) is not family.attention or type(mlp) is not family.mlp:
            continue
        for name, norm in zip(("q_norm", "k_norm"), head_norms_of(layer, d.family), strict=False):
            yield from _of_module(f"{path}.self_attn.{name}", norm, (family.norm,))
            norms.append(norm)
        yield from _of_module(f"{path}.mlp.act_fn", mlp.act_fn, _ACTIVATIONS[d.activation])
        own = {"sliding_window": kind.window, "use_rope": kind.table is not None}
        yield from _of_values(f"{path}.self_attn", attention, expected | own)
        linears = linears_of(layer)
        parts = [plain(linear) for linear in linears]
        for linear, part in zip(linears, parts, strict=True):
            if linear is not part:
                yield from _of_module(f"{path}: a LoRA layer", linear, (AdaptedLinear,))
            yield from _of_module(f"{path}: a linear layer", part, (nn.Linear,))
        if all(type(norm) is family.norm for norm in norms):
            yield from _of_weights(path, parts, norms, (base.dtype, base.device))
            widths = d.heads * d.head_dim, d.kv_heads * d.head_dim
            yield from _of_shapes(path, parts, widths)


def _of_module(
    path: str, module: nn.Module, kinds: tuple[type, ...], *, masks: bool = False
) -> Iterator[Departure]:
    """Yield a difference if a module has another class than expected, or was modified."""
    if type(module) not in kinds:
        got = f"{type(module).__module__}.{type(module).__qualname__}"
        yield Departure(f"{path} is a {got}, not a {kinds[0].__name__} of the library", masks)
    elif (what := tampered(module)) is not None:
        yield Departure(f"{path} {what}", masks)


def _of_values(path: str, module: nn.Module, expected: Mapping[str, Any]) -> Iterator[Departure]:
    """Yield attributes of a module that differ; one that it lacks does not."""
    for name, value in expected.items():
        got = getattr(module, name, value)
        if got is not value and (name == "config" or got != value):
            yield Departure(f"{path}.{name} is {got!r:.60}, not {value!r:.60}", masks=True)


def _of_weights(
    path: str, linears: list[Any], norms: list[Any], kind: tuple[torch.dtype, torch.device]
) -> Iterator[Departure]:
    """Yield weights that cannot be joined, because of their class, dtype, device or bias."""
    for module in (*linears, *norms):
        weight = module.weight
        if type(weight) is not nn.Parameter or (weight.dtype, weight.device) != kind:
            yield Departure(
                f"{path} has a weight of another kind than the head: {type(weight).__name__} "
                f"of {weight.dtype} on {weight.device}"
            )
    for group in (linears[:3], linears[4:6]):
        if len({linear.bias is None for linear in group}) > 1:
            yield Departure(f"{path} has a bias in one of the layers that are joined, not in all")


def _of_shapes(path: str, linears: list[Any], widths: tuple[int, int]) -> Iterator[Departure]:
    """Yield weights whose shapes differ from the configuration."""
    q, k, v, out, gate, up, down = (tuple(linear.weight.shape) for linear in linears)
    many, few = widths
    hidden, inner = out[0], gate[0]
    expected = ((many, hidden), (few, hidden), (few, hidden), (hidden, many))
    if (q, k, v, out) != expected or {up, gate} != {(inner, hidden)} or down != (hidden, inner):
        yield Departure(f"{path} has weights of other shapes than its configuration says")
