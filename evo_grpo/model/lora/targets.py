"""Finds the layers of a base that can have adapters, and resolves named sets of layers.

A layer must receive the rows of a batch in a known order, since they belong to different agents
(see `probing.watch_linear_inputs`). Also, PEFT must be able to load what it saves: transformers 5
keeps the experts of a mixture in one parameter, so PEFT rewrites their former names (`gate_proj` in
a Qwen3-MoE, `w1` in a Mixtral) into `target_parameters`, which the population forward does not
support.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import final

from peft import LoraConfig
from peft.tuners import tuners_utils
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn

from evo_grpo.errors import ConfigError, ModelError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.lora.configs import adapted_modules, linear_modules, with_targets
from evo_grpo.schema.patterns import ALL
from evo_grpo.schema.problems import unknown_name
from evo_grpo.settings.model import missing_layers

#: Key under which a base caches the modules of all-linear.
_SETTLED = "all_linear"


def resolve_targets(base: SharedBase, config: LoraConfig) -> LoraConfig:
    """Return a copy of a configuration whose modules the population forward supports.

    "all-linear" becomes the supported linear layers if some are not, with one warning per base;
    other names are kept. ConfigError is raised if PEFT takes names for those of experts, or has no
    default for the model; ModelError if no linear layer is supported.
    """
    targets = config.target_modules
    if targets is None and not config.target_parameters:
        kind = str(getattr(base.model.config, "model_type", None))
        targets = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind)
        if targets is None:
            raise ConfigError(
                f"lora.target_modules: expected names for a model of type {kind!r}, for which PEFT "
                'has no default, got none; "all-linear" fits every model'
            )
        config = with_targets(config, targets)
    if isinstance(targets, str) and targets.lower() == ALL:
        if _SETTLED not in base.derived:
            base.derived[_SETTLED] = _served(base, config)
        served: frozenset[str] | None = base.derived[_SETTLED]
        return config if served is None else with_targets(config, served)
    if targets and _is_converted(base, config, targets):
        raise ConfigError(
            f"lora.target_modules={targets if isinstance(targets, str) else sorted(targets)!r}: "
            f"PEFT takes some of these for the experts of {type(base.model).__name__}, which share "
            "one parameter and cannot be adapted here; name the attention's layers, or leave "
            "target_modules out"
        )
    return config


def _served(base: SharedBase, config: LoraConfig) -> frozenset[str] | None:
    """Return the supported linear layers, and warn of the others; None if all are supported."""
    linear, unserved = set(base.linear_inputs), _unserved(base)
    served = {name for name in linear - unserved.keys() if _peft_takes(base, config, name)}
    if _is_converted(base, config, linear):
        served = {name for name in served if not _is_converted(base, config, {name})}
    if not served:
        raise ModelError(
            f"model {base.name!r} ({type(base.model).__name__}): expected linear layers whose "
            f"rows can be told apart, got none among {len(linear)}; use another model"
        )
    # A layer that no token reaches would never learn, so it is left out silently.
    missing = _leaves({name for name in linear - served if unserved.get(name) != "unseen"})
    converted = _is_converted(base, config, ALL)
    if converted or _has_stacked_experts(base):
        missing.append("experts that share one parameter")
    if missing:
        warnings.warn(
            f"model {base.name!r}: all-linear adapts {', '.join(_leaves(served))} here, without "
            f"{', '.join(missing)}, which are not supported; set lora.target_modules for others",
            UserWarning,
            stacklevel=6,
        )
    return None if served == linear and not converted else frozenset(served)


def checked_modules(
    base: SharedBase, config: LoraConfig, what: str = "lora.target_modules"
) -> frozenset[str]:
    """Return the full names of the layers that a configuration of `resolve_targets` adapts.

    Layers that cannot be adapted raise ConfigError. Layers whose inputs do not have the rows in a
    known order raise ModelError. `what` names the setting in messages.
    """
    linear, unserved = linear_modules(base.model), _unserved(base)
    adapted = adapted_modules(base.model, config)
    if not adapted:
        raise ConfigError(f"{what}: {config.target_modules!r} names no layer of {base.name!r}")
    for name, module in adapted.items():
        if name not in linear:
            raise ConfigError(
                f"{what}: expected linear layers, and not the output head, which stays frozen, got "
                f"{name!r}, a {type(module).__name__}; leave it out"
            )
        # Layers without tokens are harmless, such as the cross-attention of a decoder alone.
        if (kind := unserved.get(name, "unseen")) != "unseen":
            raise ModelError(
                f"{what}: {name!r} of {base.name!r}: expected inputs with one row per completion, "
                f"got {kind}; leave it out"
            )
    return frozenset(adapted)


def _unserved(base: SharedBase) -> dict[str, str]:
    """Return the layers whose inputs do not have the rows in a known order, and their layouts."""
    return {n: kind for n, kind in base.linear_inputs.items() if kind not in ("rows", "flat")}


def _peft_takes(base: SharedBase, config: LoraConfig, name: str) -> bool:
    """Return whether PEFT adapts a layer; it refuses a Mamba's output layer."""
    check = getattr(tuners_utils, "_check_lora_target_modules_mamba", None)
    try:
        if check is not None:
            check(config, base.model, name.rpartition(".")[2])
    except ValueError:
        return False
    return True


def _is_converted(base: SharedBase, config: LoraConfig, names: Collection[str]) -> bool:
    """Return whether PEFT rewrites names into parameters of experts."""
    trial = with_targets(config, names)
    before = set(trial.target_parameters or [])
    try:
        convert_peft_config_for_transformers(trial, model=base.model, conversions=None)
    except ValueError:  # one of several fused names
        return True
    return set(trial.target_parameters or []) != before


def _leaves(names: Collection[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _has_stacked_experts(base: SharedBase) -> bool:
    """Return whether a module with "expert" in its class name has a matrix as a parameter."""
    return any(
        "expert" in type(module).__name__.lower()
        and not isinstance(module, nn.Linear)
        # One matrix is enough: DBRX concatenates the experts of a layer along the rows.
        and any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
        for module in base.trunk.modules()
    )


@final
class TargetSets:
    """Named sets of layers of a base; `declared` has the `target_modules` of each."""

    def __init__(
        self, base: SharedBase, config: LoraConfig, declared: Mapping[str, str | Sequence[str]]
    ) -> None:
        self._base = base
        self._config = config
        self._declared = declared
        self._modules: dict[str, frozenset[str]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def modules(self, name: str) -> frozenset[str]:
        """Return the full names of the layers of a set."""
        if name not in self._modules:
            targets, setting = self._declared_as(name), f"lora.target_sets.{name}"
            base, excluded = self._base, self._config.exclude_modules or ()
            if text := missing_layers(targets, linear_modules(base.model), base.name, excluded):
                raise ConfigError(f"{setting}: {text}")
            settled = resolve_targets(base, with_targets(self._config, targets))
            self._modules[name] = checked_modules(base, settled, setting)
        return self._modules[name]

    def name_of(self, modules: Collection[str]) -> str | None:
        """Return the name of the set of exactly these layers; None if there is none."""
        return next((name for name in self if self.modules(name) == frozenset(modules)), None)

    def adapting(
        self, config: LoraConfig, name: str, present: Collection[str] | None = None
    ) -> LoraConfig:
        """Return a configuration with the layers of a set.

        The configuration is returned unchanged if `present`, the full names of its layers, are
        those of the set.
        """
        if present is not None and self.modules(name) == frozenset(present):
            return config
        return with_targets(config, self._declared_as(name))

    def check(self) -> None:
        """Raise ConfigError if a set is invalid, or if two sets have the same layers."""
        names: dict[frozenset[str], str] = {}
        for name in self:
            other = names.setdefault(self.modules(name), name)
            if other != name:
                raise ConfigError(
                    f"lora.target_sets: expected sets that differ, got {other!r} and {name!r}, "
                    f"which are the same layers of {self._base.name}; remove one of them"
                )

    def _declared_as(self, name: str) -> str | Sequence[str]:
        if name not in self._declared:
            text = unknown_name(name, self._declared, "model.lora.target_sets")
            raise ConfigError(f"lora.target_modules: {text}")
        return self._declared[name]
