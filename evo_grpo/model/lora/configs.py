"""Reads, checks, compares and merges LoRA configurations, without changing any slot.

The population forward computes plain LoRA on linear layers. Settings for anything else are refused:
PEFT's forward would apply them, so the saved adapter would differ from the trained one. Adapted
modules are compared by their full names, because a regular expression, a list and "all-linear" may
select the same modules.
"""

import copy
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, cast

from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.other import get_pattern_key
from pydantic import Field, TypeAdapter
from torch import nn
from transformers.pytorch_utils import Conv1D

from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.model.lora.adapter_files import CONFIG, AdapterCopy
from evo_grpo.schema import validation
from evo_grpo.schema.patterns import ALL, module_patterns, why_no_pattern
from evo_grpo.schema.problems import validated

#: Settings that need more than the two matrices of a linear layer, or that change the base.
_LEFT_OUT = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "monteclora_config",
    "velora_config",
    "kasa_config",
)
MERGE = (
    "merge this adapter into its base (merge_and_unload() of its PeftModel, then "
    "save_pretrained()), and set model.name to the folder of the merged model"
)
"""Remedy for an adapter that agents cannot start from."""
_STARTS = (True, False, "gaussian", "orthogonal")
#: LoraConfig sets the type itself. Initialization from the base ("eva", "loftq") needs settings and
#: packages that an existing adapter does not need.
_SET_AFTERWARDS = ("peft_type", "init_lora_weights")
#: Fields other than rank and modules that change the output of an adapter.
_COMPARED = (
    "lora_alpha",
    "lora_dropout",
    "bias",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
)
_RANK = validation.Rule(
    lambda v: validation.is_whole(v) and 1 <= v <= validation.MAX_RANK,
    f"an integer from 1 to {validation.MAX_RANK}",
    "8 is usual",
)
_ALPHA = validation.Rule(
    validation.computable(validation.LEAST, validation.MOST).good,
    f"a number > 0 from {validation.LEAST:g} to {validation.MOST:g}",
    "an update scaled by 0 learns nothing; twice the rank is usual",
)
_DROPOUT = validation.number(lambda v: 0 <= v < 1, "a number in [0, 1)", "0.0 drops nothing")
_LINEAR = nn.Linear | Conv1D | BaseTunerLayer
#: Fields that restrict target_modules; full names do not need them.
_NARROWING = ("layers_to_transform", "layers_pattern", "exclude_modules")


_Alpha = int | Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class _Fields:
    """The fields of adapter_config.json that affect an adapter's output or are compared.

    Refused settings (`_LEFT_OUT`) are read without conversion. Of the initialisation, only
    `init_lora_weights` is read.
    """

    peft_type: str
    r: Annotated[int, Field(ge=1, le=validation.MAX_RANK)] = 8
    lora_alpha: _Alpha = 8
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    rank_pattern: dict[str, Annotated[int, Field(ge=1, le=validation.MAX_RANK)]] | None = None
    alpha_pattern: dict[str, _Alpha] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    modules_to_save: list[str] | None = None
    bias: str = "none"
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    inference_mode: bool = False
    init_lora_weights: bool | str = True
    task_type: str | None = None
    peft_version: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None


_FIELDS = tuple(field.name for field in fields(_Fields))
_SCHEMA = TypeAdapter(_Fields)


def read_config(folder: Path) -> LoraConfig:
    """Read adapter_config.json; CheckpointError if it is missing, not JSON, or not of LoRA."""
    file = folder / CONFIG
    try:
        values = json.loads(file.read_text(encoding="utf-8"), parse_int=validation.short_integer)
        # Without a type, PEFT would set defaults for all missing fields, even the rank.
        if not isinstance(values, dict) or values.get("peft_type") != "LORA":
            raise ValueError(
                f"expected a mapping with peft_type LORA, got {validation.shown(values)}"
            )
        parsed = validated(_SCHEMA, values)
        if (problem := next(_module_problems(parsed, values), None)) is not None:
            raise ValueError(problem)
        keywords = {name: getattr(parsed, name) for name in _FIELDS if name not in _SET_AFTERWARDS}
        for pattern in ("rank_pattern", "alpha_pattern"):
            # PEFT writes {} for no pattern, and fails on null.
            keywords[pattern] = keywords[pattern] or {}
        config = LoraConfig(**keywords)
    # A disk that refuses to read is no damage: it raises its OSError.
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {file}: not a LoRA configuration: {error}") from error
    config.init_lora_weights = parsed.init_lora_weights  # pyright: ignore[reportAttributeAccessIssue] -- any string here
    for name in set(_LEFT_OUT) - set(_FIELDS):
        if values.get(name):
            setattr(config, name, values[name])
    return config


def _module_problems(parsed: _Fields, values: Mapping[str, Any]) -> Iterator[str]:
    if parsed.target_modules is None and not values.get("target_parameters"):
        # PEFT writes the adapted modules; for null it would guess them from the model's type.
        yield "target_modules: expected names or a regular expression, got null"
    for setting, pattern in module_patterns(parsed).items():
        if why := why_no_pattern(pattern):
            shown = validation.shown(pattern)
            yield f"{setting}: expected a regular expression, got {shown} ({why})"


def check_lora_config(config: LoraConfig, remedy: str = "") -> None:
    """Raise ConfigError for a setting that the population forward does not support.

    `remedy` replaces the remedy in the message, for an adapter whose settings cannot change.
    """
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise ConfigError(f"lora: expected a plain LoraConfig, got peft_type {kind}")
    # Older and newer releases of PEFT lack some of the fields.
    reasons = {
        field: "agents share one forward, which serves plain LoRA on linear layers (no variants "
        f"such as DoRA); {remedy or f'leave {field} out'}"
        for field in _LEFT_OUT
        if getattr(config, field, None)
    }
    if config.bias != "none":
        reasons["bias"] = "the base and its biases belong to every agent and stay frozen; "
        reasons["bias"] += remedy or 'expected "none"'
    if config.init_lora_weights not in _STARTS:
        reasons["init_lora_weights"] = "it rewrites the base, which every agent shares; "
        reasons["init_lora_weights"] += remedy or f"expected one of {list(_STARTS)}"
    for field, why in reasons.items():
        raise ConfigError(f"lora.{field}={getattr(config, field)!r}: {why}")
    try:
        AdapterCopy({}, config).config_json()
    except (TypeError, ValueError) as error:
        # Otherwise the first checkpoint would fail, and the training until then would be lost.
        raise ConfigError(
            f"lora: expected what JSON can hold, for {CONFIG} of checkpoints, got {error}; give "
            "plain Python numbers and strings"
        ) from None
    for rule, field in ((_RANK, "rank_pattern"), (_ALPHA, "alpha_pattern")):
        for module, value in (getattr(config, field) or {}).items():
            rule.check(f"lora.{field}[{module!r}]", value)
    _RANK.check("lora.r", config.r)
    _ALPHA.check("lora.lora_alpha", config.lora_alpha)
    _DROPOUT.check("lora.lora_dropout", config.lora_dropout)


def differences(theirs: LoraConfig, ours: LoraConfig) -> list[tuple[str, Any, Any]]:
    """Return (field, theirs, ours) for each unequal field that changes an adapter's outputs."""
    pairs: list[tuple[str, Any, Any]] = [("r", theirs.r, ours.r)]
    pairs += [
        (field, _modules(getattr(theirs, field)), _modules(getattr(ours, field)))
        for field in ("target_modules", "modules_to_save")
    ]
    pairs += [(f, _narrowing(theirs, f), _narrowing(ours, f)) for f in _NARROWING]
    pairs += [(field, getattr(theirs, field), getattr(ours, field)) for field in _COMPARED]
    return [(field, a, b) for field, a, b in pairs if a != b]


def only_names_modules(field: str) -> bool:
    """Return whether a field only selects the adapted modules."""
    return field == "target_modules" or field in _NARROWING


def adapted_modules(model: nn.Module, config: LoraConfig) -> dict[str, nn.Module]:
    """Return the modules that a configuration names, linear or not, wrapped or not, by full name.

    They are in the model's order. "all-linear" names the linear layers without the head.
    """
    modules = own_modules(model)
    if str(config.target_modules).lower() == ALL:
        config = with_targets(config, linear_modules(model))
    return {n: module for n, module in modules.items() if check_target_module_exists(config, n)}


def tensor_shapes(model: nn.Module, config: LoraConfig) -> dict[str, tuple[int, int]]:
    """Return the shapes of A and B of the linear layers that a configuration names.

    Keys and order are those of PEFT's files.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for name, module in adapted_modules(model, config).items():
        if isinstance(module, _LINEAR):
            inputs, outputs = _features(module)
            rank = rank_of(config, name)
            shapes[f"base_model.model.{name}.lora_A.weight"] = (rank, inputs)
            shapes[f"base_model.model.{name}.lora_B.weight"] = (outputs, rank)
    return shapes


def linear_modules(model: Any) -> set[str]:  # noqa: ANN401 -- of any transformers architecture
    """Return the full names of the linear layers of a model, wrapped or not, without the head."""
    head = model.get_output_embeddings()
    return {
        name
        for name, module in own_modules(model).items()
        if isinstance(module, _LINEAR) and module is not head
    }


def _features(module: Any) -> tuple[int, int]:  # noqa: ANN401 -- a linear layer, wrapped or not
    if isinstance(module, Conv1D):
        inputs, outputs = module.weight.shape
        return inputs, outputs
    return module.in_features, module.out_features


def own_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's modules by full name, or by the first of several, without those of PEFT."""
    modules: dict[str, nn.Module] = {}
    visited: set[nn.Module] = set()
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if module in visited:
            continue
        visited.add(module)
        modules[path] = module
        if isinstance(module, BaseTunerLayer):
            visited.add(module.get_base_layer())  # a layer in two places has one wrapper
        else:
            children = [(f"{path}.{n}" if path else n, c) for n, c in module.named_children()]
            waiting += reversed(children)
    return modules


def merged_config(
    theirs: LoraConfig, ours: LoraConfig, wanted: Collection[str], live: Collection[str]
) -> tuple[LoraConfig, list[str]]:
    """Merge two configurations: larger rank, union of modules, other fields of `ours`.

    Also returns a line for each ignored value of `theirs`. `wanted` has the full names of the
    modules of `theirs`, and `live` those of `ours`.
    """
    merged = copy.deepcopy(ours)
    merged.r = max(theirs.r, ours.r)
    merged.inference_mode = False
    if not set(wanted) <= set(live):
        # Full names are comparable and need no fields that restrict them.
        merged = with_targets(merged, {*wanted, *live})
        for field in _NARROWING:
            setattr(merged, field, None)
    notes = [
        f"merge_lora_configs: {field} of the checkpoint is {a!r}, the live value {b!r} stays"
        for field, a, b in differences(theirs, ours)
        if field in _COMPARED
    ]
    before, after = _scaling(theirs), _scaling(merged)
    if not math.isclose(before, after):
        notes.append(
            f"merge_lora_configs: the checkpoint's adapter was scaled by {before:.4g}, the merged "
            f"one is by {after:.4g} (from lora_alpha and r): it acts {after / before:.3g} times as "
            "strongly; build the agent with a lora_alpha that keeps the ratio"
        )
    return merged, notes


def with_targets(config: LoraConfig, targets: str | Collection[str]) -> LoraConfig:
    """Return a copy of a configuration with other `target_modules`."""
    changed = copy.deepcopy(config)
    changed.target_modules = targets if isinstance(targets, str) else set(targets)  # pyright: ignore[reportAttributeAccessIssue] -- typed as list, kept by PEFT as set
    return changed


def rank_of(config: LoraConfig, module: str) -> int:
    """Return the rank that a configuration gives a module."""
    return _of_pattern(config.rank_pattern, module, config.r)


def alpha_of(config: LoraConfig, module: str) -> Any:  # noqa: ANN401 -- PEFT types it as int and takes floats
    """Return the alpha that a configuration gives a module."""
    return _of_pattern(config.alpha_pattern, module, config.lora_alpha)


def _of_pattern(pattern: dict[str, Any] | None, module: str, otherwise: Any) -> Any:  # noqa: ANN401 -- a rank or an alpha
    pattern = pattern or {}
    return pattern.get(get_pattern_key(list(pattern), module), otherwise)


def layer_of(key: str) -> str:
    """Return the key in `AdapterSlots.layers` of an adapter tensor's layer."""
    return key.split(".lora_")[0]


def module_of(key: str) -> str:
    """Return the full name of the base's module that an adapter's tensor belongs to."""
    return layer_of(key).removeprefix("base_model.model.")


def _scaling(config: LoraConfig) -> float:
    """Return the scale of B A for modules that neither rank_pattern nor alpha_pattern names."""
    return config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)


def _narrowing(config: LoraConfig, field: str) -> object:
    """Return a field's value; None if missing or empty. 0 is not empty: it is the first layer."""
    value = getattr(config, field, None)
    return value if value or value == 0 else None


def _modules(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(sorted(cast("set[str]", value)))
