"""LoRA slots through PEFT: add, copy, activate, remove, rebuild, read and overwrite.

A slot is an adapter name in one PeftModel, so saved adapters are ordinary PEFT folders.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from evo_grpo.errors import ConfigError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.fused import INPUT_KIND, lora_layers
from evo_grpo.model.forward.sending import fetch
from evo_grpo.model.lora import configs
from evo_grpo.model.lora.adapter_files import AdapterCopy
from evo_grpo.model.lora.targets import TargetSets, checked_modules, resolve_targets


class AdapterSlots:
    """Named LoRA adapters over one base. The first slot wraps the base's model in place.

    `config` holds the LoRA settings of new slots. `seed` seeds the initial A, which is the same for
    all slots of one configuration, so that agents differ only by training. `target_sets` maps names
    to `target_modules`; a slot may adapt the modules of one of these names.
    """

    def __init__(
        self,
        base: SharedBase,
        config: LoraConfig,
        seed: int = 0,
        target_sets: Mapping[str, str | Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.base = base
        self.config = config
        self.seed = seed
        self.target_sets = TargetSets(base, config, target_sets)
        self._peft: PeftModel | None = None
        self._params: dict[str, dict[str, nn.Parameter]] = {}
        self._trainable: dict[str, bool] = {}
        #: One for each configuration of slots, rank and alpha aside.
        self._kinds: list[_Kind] = []
        self._versions: dict[str, int] = {}
        self._last_version = 0
        self.layers: dict[str, LoraLayer] = {}
        #: The slots that train in one batch from now on; empty for all slots.
        self.together: tuple[str, ...] = ()
        #: Slots that no new slot is copied from: an engine has added hooks to their modules.
        self.reserved: set[str] = set()
        #: Caches derived from the slots' tensors, by name; emptied when slots are added or removed.
        self.derived: dict[str, Any] = {}
        #: Whether new parameters begin in host memory instead of the device of the base.
        self.begin_on_host = False

    @property
    def peft(self) -> PeftModel:
        """The PeftModel with all slots."""
        if self._peft is None:
            raise ConfigError("adapters: no slot has been added yet; call add(name) first")
        return self._peft

    @property
    def names(self) -> tuple[str, ...]:
        """Slots in the order they were added."""
        return tuple(self._params)

    def add(self, name: str, config: LoraConfig | None = None, *, trainable: bool = True) -> None:
        """Add a slot under a new name without dots, with initial weights as its settings say.

        If `init_lora_weights` is False, B is random; otherwise the slot does not change the model's
        outputs yet. `config` replaces the default settings. `trainable` is False for a frozen
        reference.
        """
        if name in self._params or not name or "." in name:
            raise ConfigError(
                f"adapters: expected a new name without dots, got {name!r}; there are "
                f"{list(self._params)}"
            )
        settings = self.settled(config or self.config)
        template = self._slot_like(settings)
        if template is not None:
            self._add_like(name, template, settings)
        else:
            self._add_by_peft(name, settings)
        self._trainable[name] = trainable
        self._begin(name)

    def _begin(self, name: str) -> None:
        """Give a slot with new parameters a version; set their `requires_grad` and device."""
        self.mark_changed(name)
        self.derived.clear()
        for parameter in self._params[name].values():
            parameter.requires_grad_(self._trainable[name])
            if self.begin_on_host:
                parameter.data = parameter.data.cpu()

    def settled(self, config: LoraConfig) -> LoraConfig:
        """Return a checked copy of a configuration, with modules that a slot can adapt."""
        settings = copy.deepcopy(config)
        # The configuration of a checkpoint has the path of its base; PEFT warns if it differs.
        settings.base_model_name_or_path = None
        configs.check_lora_config(settings)
        return resolve_targets(self.base, settings)

    def _add_by_peft(self, name: str, settings: LoraConfig) -> None:
        checked_modules(self.base, settings)  # PEFT would leave a part of the adapter in the model
        original = copy.deepcopy(settings)  # PEFT writes the modules to it
        # PEFT draws the initial A from the global generator: fork it, so no other draw moves.
        devices = [self.base.device] if self.base.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(self.seed)
            try:
                self._peft = _add_adapter(self._peft or self.base.model, settings, name)
            finally:
                self.restore_trainable()
        self.layers = lora_layers(self._peft)
        for key, layer in self.layers.items():
            vars(layer)[INPUT_KIND] = self.base.linear_inputs.get(configs.module_of(key), "rows")
        # PEFT builds modules in training mode, in which its forward applies dropout.
        self._peft.eval()
        suffixes = (f".lora_A.{name}.weight", f".lora_B.{name}.weight")
        self._params[name] = {
            # By PEFT's file keys, which leave the slot's name out.
            key.removesuffix(f".{name}.weight") + ".weight": parameter
            for key, parameter in self._peft.named_parameters()
            if key.endswith(suffixes)
        }
        kind = self._kind_of(original)
        if kind is None:
            kind = _Kind(original, self.settled(self.lora_config(name)), self.state(name))
            self._kinds.append(kind)
        kind.slots.append(name)

    def _kind_of(self, settings: LoraConfig) -> _Kind | None:
        return next((kind for kind in self._kinds if kind.makes(settings)), None)

    def _slot_like(self, settings: LoraConfig) -> str | None:
        """Return a slot whose settings differ at most in rank and alpha; None if there is none."""
        kind = self._kind_of(settings)
        usable = (n for n in (kind.slots if kind else ()) if n not in self.reserved)
        return next(usable, None)

    def _add_like(self, name: str, like: str, settings: LoraConfig) -> None:
        """Add a slot that adapts the modules of the slot `like`, layer by layer.

        With PEFT's `add_adapter`, 64 agents would take 25 times as long as 8.
        """
        kind = self._kind_of(settings)
        assert kind is not None
        copies: dict[int, Any] = {}
        for layer in self.layers.values():
            for attribute in (*layer.other_param_names, *layer.adapter_layer_names):
                values: Any = getattr(layer, attribute)
                if like in values:
                    values[name] = copy.deepcopy(values[like])
            # Another slot may adapt modules that this one leaves out.
            for matrices in (layer.lora_A, layer.lora_B) if like in layer.lora_A else ():
                copies[id(matrices[like].weight)] = matrices[name].weight
        self.peft.peft_config[name] = copy.deepcopy(self.peft.peft_config[like])
        self._params[name] = {key: copies[id(p)] for key, p in self._params[like].items()}
        kind.slots.append(name)
        config = self.lora_config(name)
        ranks = {(c.r, c.lora_alpha) for c in (settings, config, kind.config)}
        if len(ranks) > 1:
            self._set_rank(name, settings)
            return
        with torch.no_grad():
            for key, parameter in self._params[name].items():
                parameter.copy_(kind.state[key])

    def _set_rank(self, name: str, settings: LoraConfig) -> None:
        """Give a slot new matrices of another rank and alpha, layer by layer, as PEFT draws them.

        Removing and adding the slot through PEFT would visit all modules several times.
        """
        config = copy.deepcopy(self.lora_config(name))
        config.r, config.lora_alpha, config.inference_mode = settings.r, settings.lora_alpha, False
        devices = [self.base.device] if self.base.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(self.seed)
            adapted = set(map(configs.layer_of, self._params[name]))
            for path, layer in self.layers.items():
                if path in adapted:
                    module = configs.module_of(path)
                    rank, alpha = configs.rank_of(config, module), configs.alpha_of(config, module)
                    layer.update_layer(name, rank, alpha, config=config)
        for key in self._params[name]:
            path, matrix = configs.layer_of(key), key.removesuffix(".weight").rpartition(".")[2]
            module = getattr(self.layers[path], matrix)[name]
            if module.weight.dtype in (torch.float16, torch.bfloat16):  # as PEFT casts adapters up
                module.weight.data = module.weight.data.float()
            self._params[name][key] = module.weight
        self.peft.peft_config[name] = config
        self.peft.eval()
        self.restore_trainable()

    def _set_kind(self, name: str, kind: _Kind, settings: LoraConfig) -> None:
        """Make a slot adapt the layers of `kind`, with new matrices, one layer after another."""
        active = name in self.peft.active_adapters
        if active and len(self._params) > 1:  # else PEFT activates another adapter and warns
            self.activate(next(other for other in self._params if other != name))
        adapted = set(map(configs.layer_of, kind.state))
        for path, layer in self.layers.items():
            if path not in adapted and name in layer.lora_A:
                layer.delete_adapter(name)
        self.peft.peft_config[name] = copy.deepcopy(kind.written)
        self._params[name] = dict.fromkeys(kind.state, nn.Parameter(torch.empty(0)))
        self._set_rank(name, settings)
        if active:
            self.activate(name)
        self._forget_kind(name)
        kind.slots.append(name)

    def parameters(self, name: str) -> list[nn.Parameter]:
        """Return a slot's parameters, in the same order for all slots of one configuration."""
        return list(self._params[self._known(name)].values())

    def shapes(self, name: str) -> dict[str, torch.Size]:
        """Return the shapes of a slot's parameters by PEFT's file keys, in their order."""
        return {key: p.shape for key, p in self._params[self._known(name)].items()}

    def modules(self, name: str) -> set[str]:
        """Return the full names of the base's layers that a slot adapts."""
        return {configs.module_of(key) for key in self._params[self._known(name)]}

    @property
    def versions(self) -> dict[str, int]:
        """Version of the weights of each slot; versions are unique among all slots."""
        return dict(self._versions)

    def mark_changed(self, name: str) -> None:
        """Give a slot a new version; call this after writing to `parameters(name)` directly."""
        self._last_version += 1
        self._versions[self._known(name)] = self._last_version

    def is_trainable(self, name: str) -> bool:
        """Return whether a slot learns; a frozen reference does not."""
        return self._trainable[self._known(name)]

    def lora_config(self, name: str) -> LoraConfig:
        """Return a slot's LoraConfig."""
        config = self.peft.peft_config[self._known(name)]
        assert isinstance(config, LoraConfig)
        return config

    @torch.no_grad()
    def copy(self, source: str, target: str) -> None:
        """Copy a slot's weights to another slot with equal modules, shapes and scaling."""
        shapes = [list(self.shapes(name).items()) for name in (source, target)]
        scalings = [[x.scaling.get(n) for x in self.layers.values()] for n in (source, target)]
        assert (shapes[0], scalings[0]) == (shapes[1], scalings[1]), f"{source} is unlike {target}"
        # One kernel launch for all tensors of a slot; torch has no public function for it.
        torch._foreach_copy_(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage] -- see above
            [*self.parameters(target)], [*self.parameters(source)]
        )
        self.mark_changed(target)

    def activate(self, name: str) -> None:
        """Make a slot PEFT's active adapter; the population forward ignores which one is active."""
        self.peft.set_adapter(self._known(name))
        self.restore_trainable()

    def remove(self, name: str) -> None:
        """Delete a slot; the last slot cannot be deleted, since PEFT needs an adapter."""
        self._known(name)
        if len(self._params) == 1:
            raise ConfigError(
                f"adapters: {name!r} is the only slot; add another before removing it"
            )
        if name in self.peft.active_adapters:
            # Otherwise PEFT activates another adapter and warns.
            self.activate(next(other for other in self._params if other != name))
        # Layer by layer: PEFT's `delete_adapter` walks over the modules of all adapters for each.
        for layer in self.layers.values():
            layer.delete_adapter(name)
        del self.peft.peft_config[name], self._params[name]
        self._forget_kind(name)
        self._trainable.pop(name)
        self._versions.pop(name)
        self.derived.clear()

    def _forget_kind(self, name: str) -> None:
        for kind in self._kinds:
            kind.slots = [other for other in kind.slots if other != name]

    def rebuild(self, name: str, config: LoraConfig) -> None:
        """Give a slot another configuration and new parameters; no other slot changes."""
        self._known(name)
        settings, spare = self.settled(config), f"{name}_spare"
        kind = self._kind_of(settings)
        if kind is None or any(configs.layer_of(key) not in self.layers for key in kind.state):
            # PEFT wraps further layers, and refuses a wrong configuration before the slot changes.
            self.add(spare, settings)
            kind = self._kind_of(settings)
        assert kind is not None
        self._set_kind(name, kind, settings)
        if spare in self._params:
            self.remove(spare)
        self._begin(name)

    def state(self, name: str) -> dict[str, Tensor]:
        """Return detached CPU copies of a slot's tensors, by PEFT's file keys."""
        # Same as get_peft_model_state_dict, without a pass over the whole model per slot.
        parameters = self._params[self._known(name)]
        return dict(zip(parameters, fetch(list(parameters.values())), strict=True))

    def snapshot(self, name: str) -> AdapterCopy:
        """Return a CPU copy of a slot with its configuration, to be written later."""
        config = copy.deepcopy(self.lora_config(name))
        config.inference_mode = True
        config.base_model_name_or_path = self.base.name
        return AdapterCopy(self.state(name), config)

    def put(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Overwrite a slot with tensors of equal shapes, by PEFT's file keys."""
        shapes = {key: value.shape for key, value in state.items()}
        assert shapes == self.shapes(name), f"the tensors of another adapter than {name}"
        # Not by PEFT, which walks over the modules of all adapters for each that it loads.
        with torch.no_grad():
            for key, parameter in self._params[name].items():
                parameter.copy_(state[key])
        self.mark_changed(name)

    def restore_trainable(self) -> None:
        """Restore `requires_grad` of all slots after calls of PEFT that change it."""
        # set_adapter and add_adapter flip requires_grad of other slots; the population trains all
        # of them at once.
        for name, trainable in self._trainable.items():
            for parameter in self._params[name].values():
                parameter.requires_grad_(trainable)

    def _known(self, name: str) -> str:
        if name not in self._params:
            raise ConfigError(f"adapters: no slot {name!r}; expected one of {list(self._params)}")
        return name


@dataclass
class _Kind:
    """The slots whose configurations differ at most in rank and alpha.

    Attributes:
        config: The configuration of the first slot.
        written: `config` as PEFT stores it, with names in place of `all-linear`.
        state: The initial tensors of the first slot by PEFT's file keys, on the CPU.
        slots: The existing slots.
    """

    config: LoraConfig
    written: LoraConfig
    state: dict[str, Tensor]
    slots: list[str] = field(default_factory=list[str])

    def makes(self, settings: LoraConfig) -> bool:
        """Return whether slots of these settings belong to this kind."""
        adjusted = copy.copy(settings)
        adjusted.r, adjusted.lora_alpha = self.config.r, self.config.lora_alpha
        return adjusted in (self.config, self.written)


def _add_adapter(model: Any, config: LoraConfig, name: str) -> PeftModel:  # noqa: ANN401 -- of any architecture
    """Add an adapter to a model, which is wrapped in place."""
    with warnings.catch_warnings():
        # PEFT 0.21 uses a deprecated name of transformers 5, which the user cannot change.
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", category=FutureWarning
        )
        # GPT-2's Conv1D layers: PEFT corrects the setting itself.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to", category=UserWarning)
        try:
            # PEFT casts 16-bit adapters up to float32; the forward casts down.
            if not isinstance(model, PeftModel):
                return get_peft_model(model, config, adapter_name=name)  # pyright: ignore[reportReturnType] -- no mixed one
            model.add_adapter(name, config)
        except ValueError as error:
            raise ConfigError(f"lora: the adapter does not fit the model: {error}") from error
    return model
