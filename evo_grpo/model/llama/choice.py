"""The choice between the joined layers of the Llama family and a base's own modules.

The joined layers use a model's weights and compute the same as the `families` of transformers. A
model of such a type may compute something else: it may have another norm or activation, another
`scaling`, a hook, a patched attention, or code from a hub folder. Before each generation and each
learn pass, since a hook may be registered at any time, the classes of its modules, their hooks and
the origin of their code are inspected. `comparison` compares the numbers, once for the values that
the modules have.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import NoneType
from typing import Any

from peft.tuners.lora import Linear as AdaptedLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import masking_utils
from transformers.activations import ACT2FN
from transformers.integrations import sdpa_attention

from evo_grpo.errors import ModelError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.llama.comparison import find_difference
from evo_grpo.model.llama.families import describe
from evo_grpo.model.llama.weights import is_llama_family, layers_of
from evo_grpo.model.origin import (
    class_from_libraries,
    foreign_functions,
    from_libraries,
    global_hook,
    tampered,
)

_log = logging.getLogger(__name__)
_DIFFERENCE, _SAID, _WHOLE = "llama difference", "llama departures", "hooks of the whole"
#: Classes of modules besides those that the code of a family defines.
_KINDS = (
    nn.Linear,
    nn.Embedding,
    nn.ModuleList,
    type(ACT2FN["silu"]),
    type(ACT2FN["gelu_pytorch_tanh"]),
)
#: Attributes that say how a module is used, and the types of those that it computes with.
_STATE = frozenset({*vars(nn.Module()), "gradient_checkpointing"})
_VALUES = (int, float, str, NoneType)


def takes_fast_path(base: SharedBase, adapted: Mapping[str, LoraLayer]) -> bool:
    """Return whether the joined layers compute what a base's own modules compute.

    If not, the reason is logged once. A hook on the whole model, which the population forward does
    not call, raises ModelError.
    """
    _refuse_hook_on_the_whole(base)
    if not base.specialized or not is_llama_family(base):
        return False
    found = departures_of(base, adapted)
    if not found:
        return True
    said: set[str] = base.derived.setdefault(_SAID, set())
    if found[0] not in said:
        said.add(found[0])
        _log.warning(
            "model %r (%s): computed by its own modules, not by the faster layers of the Llama "
            "family: %s",
            base.name,
            type(base.model).__name__,
            found[0],
        )
    return False


def departures_of(base: SharedBase, adapted: Mapping[str, LoraLayer]) -> tuple[str, ...]:
    """Return how a base of the family differs from its type, in code or numbers, as clauses."""
    found, values = _inspect(base)
    if found:
        return tuple(found)
    kept: tuple[list[object], str | None] | None = base.derived.get(_DIFFERENCE)
    if kept is None or kept[0] != values:
        kept = base.derived[_DIFFERENCE] = values, find_difference(base, adapted)
    return () if kept[1] is None else (kept[1],)


def find_departures(base: SharedBase) -> tuple[str, ...]:
    """Return how a base of the family differs from its type in code, without running it."""
    return tuple(_inspect(base)[0])


def _refuse_hook_on_the_whole(base: SharedBase) -> None:
    """Raise ModelError for a hook or forward on the whole model that was added after loading.

    `check_forward` has checked earlier ones.
    """
    now = tampered(base.model)
    before: str | None = base.derived.setdefault(_WHOLE, now)
    if now is not None and before is None:
        raise ModelError(
            f"model {base.name!r} ({type(base.model).__name__}): the whole model {now} since "
            "agents were made over it, which would never be called, since its head and the part "
            f"below run apart; put it on model.{base.model.base_model_prefix} or on the head, or "
            "remove it"
        )


def _inspect(base: SharedBase) -> tuple[list[str], list[object]]:
    """Return how a base of the family differs in code, and the values that its modules use.

    This takes two milliseconds.
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
    found = list(_of_code(code, kinds, getattr(trunk.config, "_attn_implementation", None)))
    if type(trunk) is not code[family.name + family.trunk]:
        return [f"model is a {_name(trunk)}, which is not of the library", *found], []
    if trunk.config is not config and trunk.config != config:
        found.append("model.config is not the configuration of the whole model")
    own_embedding = base.model.get_input_embeddings() is trunk.embed_tokens
    values: list[object] = [description, own_embedding, getattr(config, "is_causal", True)]
    # These are called, not read.
    called = AdaptedLinear, code[family.name + "RotaryEmbedding"]
    kinds.add(AdaptedLinear)
    modules: list[nn.Module] = [trunk]
    for module in modules:
        own = vars(module)
        adapted = type(module) is AdaptedLinear
        modules += [module.base_layer] if adapted else own["_modules"].values()
        if what := _departure(module, kinds, trunk.config, base.head.weight):
            name = next(name for name, one in base.model.named_modules() if one is module)
            found.append(f"{name} {what}")
        if type(module) not in called:
            values += [weight is None for weight in own["_parameters"].values()]
            values += [v for k, v in own.items() if k not in _STATE and isinstance(v, _VALUES)]
    for layer, kind in () if found else zip(layers_of(base), description.layers, strict=False):
        # A row within the window, as that of the comparison, does not show another one.
        window = getattr(layer.self_attn, "sliding_window", kind.window)
        if window != kind.window:
            found.append(f"one of its layers has a window of {window}, not {kind.window}")
    return found, values


def _departure(
    module: nn.Module, kinds: set[type[nn.Module]], config: object, head: Tensor
) -> str | None:
    if type(module) not in kinds:
        return f"is a {_name(module)}, which is not of the library"
    if (what := tampered(module)) is not None:
        return what
    own = vars(module)
    if own.get("config", config) is not config:
        return "has a configuration of its own"
    for name, weight in own["_parameters"].items():
        if weight is not None and (
            type(weight) is not nn.Parameter
            or weight.dtype != head.dtype
            or weight.device != head.device
        ):
            return f"has a {name} of another kind than the head"
    return None


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _of_code(
    code: Mapping[str, Any], kinds: set[type[nn.Module]], attention: str | None
) -> Iterator[str]:
    """Yield classes and functions of torch and transformers that were replaced."""
    for kind in kinds:
        if not class_from_libraries(kind):
            yield f"{kind.__module__}.{kind.__qualname__} runs other code"
    for namespace in (code, *map(vars, (masking_utils, sdpa_attention, nn.functional))):
        for name in foreign_functions(namespace):
            yield f"{namespace['__name__']}.{name} is replaced"
    chosen = attention or "eager"
    eager = code["eager_attention_forward"] if chosen == "eager" else None
    for what, function in (
        ("attention", code["ALL_ATTENTION_FUNCTIONS"].get(chosen, eager)),
        ("mask of the attention", masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(chosen)),
    ):
        if function is None or not from_libraries(function):
            yield f"the {what} {chosen!r} is not transformers' own"
    if name := global_hook():
        yield f"there is a {name}"
