"""Chooses between the joined layers of the Llama family and a base's own modules.

The joined layers use a model's weights and compute what transformers computes for the model types
in `families`. A model of such a type may still differ in a norm, an activation, `scaling`, a hook,
a patched attention, or code from a hub folder. Before each generation and learn pass, the classes
of its modules, their hooks and the origin of their code are inspected. Outputs are compared once,
and again if a value in the modules has changed: one row runs through the modules, and each joined
layer gets the input of its module, because a difference in one layer may vanish in the sum of all
layers. The row is long, longer for small models, because some differences appear only at late
positions.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import NoneType
from typing import Any

import torch
from peft.tuners.lora import Linear as AdaptedLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import masking_utils
from transformers.activations import ACT2FN
from transformers.integrations import sdpa_attention

from evo_grpo.model import origin, probing
from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.fused import population_forward
from evo_grpo.model.forward.stacks import RowLayout, make_chunks
from evo_grpo.model.llama.attention import Attention
from evo_grpo.model.llama.families import LayerKind, describe
from evo_grpo.model.llama.functions import Span, linear
from evo_grpo.model.llama.train import normalized, run_layer
from evo_grpo.model.llama.weights import (
    JoinedLayer,
    JoinedLinear,
    LlamaWeights,
    is_llama_family,
    layers_of,
)
from evo_grpo.model.out_of_memory import is_out_of_memory

_log = logging.getLogger(__name__)
_DIFFERENCE, _LOGGED = "llama difference", "llama departures"
#: Module classes that are allowed besides those of the family.
_KINDS = (
    nn.Linear,
    nn.Embedding,
    nn.ModuleList,
    type(ACT2FN["silu"]),
    type(ACT2FN["gelu_pytorch_tanh"]),
)
#: Attributes that are not compared, and the types of those that are.
_STATE = frozenset({*vars(nn.Module()), "gradient_checkpointing"})
_VALUES = (int, float, str, NoneType)
#: Minimum and maximum tokens of the row, and tokens times weights of the layers in between.
_LEAST, _MOST, _PRODUCTS = 24, 160, 1 << 26
#: Lower bound of a layer's update, as a share of its input, for relative errors: below it, the
#: rounding of the sum dominates.
_SHARE = 1e-2
#: One row without adapters.
_ALONE = RowLayout((None,), (1,))


def can_join_layers(base: SharedBase, adapted: Mapping[str, LoraLayer]) -> bool:
    """Return whether the joined layers compute what a base's own modules compute.

    If not, the reason is logged once.
    """
    if not base.specialized or not is_llama_family(base):
        return False
    departures = departures_of(base, adapted)
    if not departures:
        return True
    logged: set[str] = base.derived.setdefault(_LOGGED, set())
    if departures[0] not in logged:
        logged.add(departures[0])
        _log.warning(
            "model %r (%s): computed by its own modules, not by the faster layers of the Llama "
            "family: %s",
            base.name,
            type(base.model).__name__,
            departures[0],
        )
    return False


def departures_of(base: SharedBase, adapted: Mapping[str, LoraLayer]) -> tuple[str, ...]:
    """Describe how the code or outputs of a base differ from those of its model type."""
    departures, values = _inspect(base)
    if departures:
        return tuple(departures)
    cached: tuple[list[object], str | None] | None = base.derived.get(_DIFFERENCE)
    if cached is None or cached[0] != values:
        cached = base.derived[_DIFFERENCE] = values, find_difference(base, adapted)
    return () if cached[1] is None else (cached[1],)


def find_departures(base: SharedBase) -> tuple[str, ...]:
    """Describe how the code of a base differs from that of its model type, without a forward."""
    return tuple(_inspect(base)[0])


def _inspect(base: SharedBase) -> tuple[list[str], list[object]]:
    """Return how a base's code differs from that of its model type, and values of its modules.

    If one of the values changes, outputs must be compared again. The inspection takes 2 ms.
    """
    trunk, config = base.trunk, base.model.config
    description = describe(config)
    assert description is not None, "the base is of no family"
    family = description.family
    code = vars(import_module(f"transformers.models.{family.module}.modeling_{family.module}"))
    names = ("DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding", family.trunk)
    parts: list[type[nn.Module]] = [code[family.name + name] for name in names]
    if family.embedding:
        parts.append(code[family.name + family.embedding])
    kinds = {*_KINDS, *parts}
    departures = list(_of_code(code, kinds, getattr(trunk.config, "_attn_implementation", None)))
    if type(trunk) is not code[family.name + family.trunk]:
        return [f"model is a {_name(trunk)}, which is not of the library", *departures], []
    if trunk.config is not config and trunk.config != config:
        departures.append("model.config is not the configuration of the whole model")
    own_embedding = base.model.get_input_embeddings() is trunk.embed_tokens
    values: list[object] = [description, own_embedding, getattr(config, "is_causal", True)]
    # Called, so their values need no comparison.
    called = AdaptedLinear, code[family.name + "RotaryEmbedding"]
    kinds.add(AdaptedLinear)
    like = nn.Parameter, base.dtype, base.device
    modules: list[nn.Module] = [trunk]
    for module in modules:
        attributes, kind = vars(module), type(module)
        children: dict[str, nn.Module] = attributes["_modules"]
        modules += [children["base_layer"]] if kind is AdaptedLinear else children.values()
        if departure := _departure(module, kinds, trunk.config, like):
            name = next(name for name, m in base.model.named_modules() if m is module)
            departures.append(f"{name} {departure}")
        if kind not in called:
            values += [kind, *(weight is None for weight in attributes["_parameters"].values())]
        if kind not in called and kind is not nn.Linear:  # its weight says all
            extras = {k: v for k, v in attributes.items() if k not in _STATE}
            values += [v for v in extras.values() if isinstance(v, _VALUES) or callable(v)]
    if not departures:
        departures += _of_layers(layers_of(base), description.layers)
    return departures, values


def _of_layers(layers: Sequence[nn.Module], described: Sequence[LayerKind]) -> Iterator[str]:
    """Yield differences between layers and configuration that a comparison of outputs may miss."""
    if len(layers) != len(described):
        yield f"it has {len(layers)} layers, and {len(described)} by its configuration"
    for layer, kind in zip(layers, described, strict=False):
        # The compared row may be within both windows.
        attention: Any = layer.self_attn
        window = getattr(attention, "sliding_window", kind.window)
        if window != kind.window:
            yield f"one of its layers has a window of {window}, not {kind.window}"


def _departure(
    module: nn.Module, kinds: set[type[nn.Module]], config: object, weights: tuple[object, ...]
) -> str | None:
    """Return how a module differs from the expected classes, configuration or weights; or None."""
    if type(module) not in kinds:
        return f"is a {_name(module)}, which is not of the library"
    if (problem := origin.forward_change(module)) is not None:
        return problem
    attributes = vars(module)
    if attributes.get("config", config) is not config:
        return "has a configuration of its own"
    for name, weight in attributes["_parameters"].items():
        if weight is not None and (type(weight), weight.dtype, weight.device) != weights:
            return f"has a {name} of another kind than the head"
    return None


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _of_code(
    code: Mapping[str, Any], kinds: set[type[nn.Module]], attention: str | None
) -> Iterator[str]:
    """Yield a sentence for each class or function of torch or transformers that was replaced."""
    for kind in kinds:
        if not origin.class_from_libraries(kind):
            yield f"{kind.__module__}.{kind.__qualname__} runs other code"
    for namespace in (code, *map(vars, (masking_utils, sdpa_attention))):
        for name in origin.foreign_functions(namespace):
            yield f"{namespace['__name__']}.{name} is replaced"
    implementation = attention or "eager"
    eager = code["eager_attention_forward"] if implementation == "eager" else None
    for role, function in (
        ("attention", code["ALL_ATTENTION_FUNCTIONS"].get(implementation, eager)),
        ("mask of the attention", masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)),
    ):
        if function is None or not origin.from_libraries(function):
            yield f"the {role} {implementation!r} is not transformers' own"
    if name := origin.global_hook():
        yield f"there is a {name}"


class _LayersDiffer(Exception):
    """The modules and the joined layers differ; the message is a clause that says how."""


def find_difference(base: SharedBase, adapted: Mapping[str, LoraLayer]) -> str | None:
    """Return how outputs of a base's modules and of the joined layers differ; None if they agree.

    Both run without adapters. The code of the base must not differ from that of its model type.
    """
    size = sum(p.numel() for layer in layers_of(base) for p in layer.parameters())
    columns = max(_LEAST, min(_MOST, _PRODUCTS // max(1, size)))
    columns = max(2, min(columns, base.context_length or columns))
    with (
        # Whatever modes are active at the call.
        torch.inference_mode(False),
        torch.autocast(base.device.type, enabled=False),
        probing.own_generator(base.device),
        population_forward(dict(adapted), _ALONE, frozen=True),
    ):
        special = (base.pad_id, *base.eos_ids)
        ids = probing.probe_ids(base.vocabulary, 1, columns, special).to(base.device)
        try:
            weights = LlamaWeights(base, adapted)
            if base.dtype in probing.HALF:
                # Rounding in half precision hides small differences.
                try:
                    with probing.in_float32(base.trunk):
                        return _compare(weights, ids)
                except probing.CANNOT_RUN as problem:
                    # Some attention kernels support only half precision.
                    if is_out_of_memory(problem):
                        raise
            _compare(weights, ids)
        except _LayersDiffer as difference:
            return str(difference)
        except probing.CANNOT_RUN as problem:
            if is_out_of_memory(problem):
                raise
            return f"one of the two does not run: {type(problem).__name__}: {problem}"[:300]
    return None


def _compare(weights: LlamaWeights, ids: Tensor) -> None:
    """Run the modules on ids (1, T); raise `_LayersDiffer` for the first layer that differs."""
    base, norm, layers = weights.base, weights.norm, layers_of(weights.base)
    attentions: dict[LayerKind, Attention] = {}
    #: The input of the first layer, and the output of each layer and of the last norm.
    states = [weights.embedded(ids)]

    def of_layer(
        number: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,  # noqa: ANN401 -- a tensor, or a tuple in older releases
    ) -> None:
        if number != len(states) - 1:
            raise _LayersDiffer(f"layer {number} runs when {len(states) - 1} layers have run")
        x: Tensor = args[0] if args else kwargs["hidden_states"]
        _same(x, states[-1], f"what comes before layer {number}")
        theirs = output if isinstance(output, Tensor) else output[0]
        _compare_update(_joined(weights, attentions, number, module, x), theirs, x, number)
        states.append(theirs)

    def of_norm(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        del module
        _same(normalized(norm, args[0]), output, "its last norm")
        states.append(output)

    # First in order: a later hook restores the weights to half precision.
    hooks: list[Any] = [
        layer.register_forward_hook(partial(of_layer, number), prepend=True, with_kwargs=True)
        for number, layer in enumerate(layers)
    ]
    hooks.append(norm.module.register_forward_hook(of_norm, prepend=True))
    try:
        hidden = base.hidden(ids)
    finally:
        for hook in hooks:
            hook.remove()
    if len(states) != len(layers) + 2:
        raise _LayersDiffer(f"it runs {len(states) - 2} of {len(layers)} layers")
    _same(hidden, states[-1], "what follows its last norm")


def _joined(
    weights: LlamaWeights,
    attentions: dict[LayerKind, Attention],
    number: int,
    module: nn.Module,
    x: Tensor,
) -> Tensor:
    """Run the decoder layer `module`, with its linear layers joined, on x (1, T, H)."""
    d = weights.description
    kind = d.layers[number]
    # A copy of one layer: in half precision its weights have been widened for now.
    layer = JoinedLayer.join(module, d.family, {}, in_place=False)
    if kind not in attentions:
        columns = x.shape[1]
        chunks = make_chunks((1,), columns, 0, x.device)
        spans = (Span(0, 1, columns, chunks, *weights.rotary(columns, x[0], kind.table)),)
        attentions[kind] = Attention(
            d.heads, d.kv_heads, spans, None, x[0], scale=d.scale, window=kind.window
        )
    return run_layer(d, layer, x[0], attentions[kind], _product)[None]


def _product(base: JoinedLinear, x: Tensor, residual: Tensor | None = None) -> Tensor:
    return linear(x, residual, base.weight, base.bias)


def _same(ours: Tensor, theirs: Tensor, what: str) -> None:
    error, allowed = probing.relative_error(ours, theirs), probing.tolerance(theirs)
    if error > allowed:
        raise _LayersDiffer(f"{what} differs by {error:.2g} of its size")


def _compare_update(ours: Tensor, theirs: Tensor, before: Tensor, number: int) -> None:
    """Raise `_LayersDiffer` if two outputs of layer `number` for input `before` differ."""
    size = torch.maximum(_size(theirs - before), _SHARE * _size(before))
    error = float((_size(ours - theirs) / size.clamp_min(1e-9)).max())
    if not error <= probing.tolerance(theirs):
        raise _LayersDiffer(f"layer {number} differs by {error:.2g} of what it adds")


def _size(values: Tensor) -> Tensor:
    return values.float().pow(2).mean(-1).sqrt()
