"""Loads adapters into slots, from PEFT folders or from a PeftModel that the user passes as model.

Configurations that differ from the slot's are refused or merged. The merged configuration has the
larger rank and the union of the modules; rank_pattern must be equal, and all other fields keep the
slot's value, with a warning. Smaller matrices are copied to the top-left corner of those of a new
slot. For ranks and modules that the checkpoint lacks, A is random and B is zero: the output stays,
and, unlike with two zeros, B gets a gradient. The scale depends on lora_alpha and rank; a merge
that changes it warns.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from torch import Tensor

from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.model.lora import configs
from evo_grpo.model.lora.adapter_files import CONFIG, AdapterCopy, read_adapter
from evo_grpo.model.lora.slots import AdapterSlots

_SLOT = re.compile(r"(actor|reference)_\d+")
_SHARE = (
    "make several agents over one model with GRPO.population(size=...) or agent.clone(); for "
    "weights of one's own, save the adapter with save_pretrained(folder), give a model without "
    "adapters, and call agent.load_checkpoint(folder)"
)


@dataclass(frozen=True)
class AdapterPlan:
    """An adapter that was read and checked against a slot, so that applying it cannot fail.

    Attributes:
        state: Every tensor of the slot, by PEFT's file keys.
        config: New configuration of the slot; None for no change.
        shapes: Shapes of the slot's parameters after `apply`, by PEFT's file keys, in the order of
            the parameters.
        read_shapes: Shapes of the adapter's tensors as they were read.
    """

    slots: AdapterSlots
    name: str
    origin: Path
    state: dict[str, Tensor]
    config: LoraConfig | None
    shapes: Mapping[str, Sequence[int]]
    read_shapes: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...]

    def apply(self) -> None:
        """Overwrite the slot. A rebuilt slot has new parameters."""
        if self.config is not None:
            self.slots.rebuild(self.name, self.config)
        self.slots.put(self.name, self.state)


def plan_adapter(
    slots: AdapterSlots,
    name: str,
    folder: Path,
    *,
    merge: bool = False,
    becomes: LoraConfig | None = None,
) -> AdapterPlan:
    """Plan to load a PEFT folder; see `plan_copy`. Damaged files raise CheckpointError."""
    state = read_adapter(folder)
    adapter = AdapterCopy(state, configs.read_config(folder))
    return plan_copy(slots, name, adapter, folder, merge=merge, becomes=becomes)


def plan_copy(
    slots: AdapterSlots,
    name: str,
    adapter: AdapterCopy,
    origin: Path,
    *,
    merge: bool = False,
    becomes: LoraConfig | None = None,
) -> AdapterPlan:
    """Plan to load an adapter of a PEFT folder into a slot; the slot does not change yet.

    The adapter's configuration is compared with `becomes`, the slot's next configuration; if None,
    with its present one. Different configurations are merged if `merge`, else refused. An
    adapter of another base raises CheckpointError; a merged configuration that cannot be trained
    raises ConfigError.
    """
    model, present = slots.base.model, slots.lora_config(name)
    stored, live = adapter.config, present if becomes is None else slots.settled(becomes)
    stored_shapes = configs.tensor_shapes(model, stored)
    shapes = slots.shapes(name) if live is present else configs.tensor_shapes(model, live)
    # Before padding, which would make matrices of a smaller base fit this one.
    _check_tensors(adapter.state, stored_shapes, f"checkpoint {origin}", slots.base.name)
    stored_names, live_names = (
        {configs.module_of(k) for k in stored_shapes},
        {configs.module_of(k) for k in shapes},
    )
    different = [
        d
        for d in configs.differences(stored, live)
        if stored_names != live_names or not configs.only_names_modules(d[0])
    ]
    problem = ""
    if different and not merge:
        listed = "; ".join(f"{field}: checkpoint {a!r}, live {b!r}" for field, a, b in different)
        problem = (
            f"its LoRA configuration differs from the live one ({listed}); pass "
            "merge_lora_configs=True to reconcile them"
        )
    elif different and stored.rank_pattern != live.rank_pattern:
        problem = (
            f"expected the live rank_pattern {live.rank_pattern}, got {stored.rank_pattern}; "
            "merge_lora_configs pads to one r alone: build the agent with the checkpoint's "
            "rank_pattern"
        )
    if problem:
        raise CheckpointError(f"checkpoint {origin}: {problem}")
    state, config, notes = adapter.state, live, list[str]()
    if different:
        config, notes = configs.merged_config(stored, live, stored_names, live_names)
        fresh = _fresh_state(slots, f"{name}_trial", config)
        state = {k: padded(state[k], v) if k in state else v for k, v in fresh.items()}
        shapes = {key: value.shape for key, value in fresh.items()}
    broken = next((key for key, value in state.items() if not value.isfinite().all()), None)
    if broken is not None:
        notes.append(
            f"checkpoint {origin}: {broken} holds numbers that are not finite; what it generates "
            "and learns is undefined. Load an earlier checkpoint"
        )
    new_config = trainable(config) if configs.differences(config, present) else None
    return AdapterPlan(slots, name, origin, state, new_config, shapes, stored_shapes, tuple(notes))


def _check_tensors(
    state: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], what: str, base: str
) -> None:
    """Raise CheckpointError unless `state` has just the tensors of `shapes`, floats of 16+ bits."""
    for key in sorted({*shapes, *state}):
        tensor = state.get(key)
        # Torch does not compute in floats of 8 bits.
        floats = tensor is not None and tensor.is_floating_point() and tensor.dtype.itemsize > 1
        if tensor is None or not floats or tensor.shape != shapes.get(key):
            got = "none" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise CheckpointError(
                f"{what}: expected A and B, in 16 bits or more, of the linear layers of {base!r} "
                f"that its {CONFIG} names: as {key} {shapes.get(key, 'none')}, got {got}; give an "
                "adapter of this base model, with both files as they were saved"
            )


def copy_slot(slots: AdapterSlots, source: str, target: str) -> None:
    """Copy a slot's weights to another slot, which is rebuilt if its configuration differs."""
    fit_slot(slots, target, slots.lora_config(source))
    slots.copy(source, target)


def fit_slot(slots: AdapterSlots, name: str, config: LoraConfig) -> None:
    """Rebuild a slot, with new parameters, if its configuration differs from `config`."""
    if configs.differences(config, slots.lora_config(name)):
        slots.rebuild(name, trainable(config))


def padded(value: Tensor, fresh: Tensor) -> Tensor:
    """Return `value`, or `fresh` with `value` in its top-left corner if `value` is smaller."""
    fits = value.ndim == fresh.ndim and all(
        a <= b for a, b in zip(value.shape, fresh.shape, strict=True)
    )
    if value.shape == fresh.shape or not fits:
        return value
    matrix = fresh.clone()
    matrix[tuple(slice(0, n) for n in value.shape)] = value
    return matrix


def _fresh_state(slots: AdapterSlots, name: str, config: LoraConfig) -> dict[str, Tensor]:
    """Return the initial tensors of a slot with a configuration, with B = 0 in any case."""
    slots.add(name, config, trainable=False)
    state = slots.state(name)
    slots.remove(name)
    return {k: torch.zeros_like(v) if ".lora_B." in k else v for k, v in state.items()}


def detach_adapter(network: Any) -> tuple[Any, AdapterCopy | None]:  # noqa: ANN401 -- of any transformers architecture
    """Separate a model from its adapter; return the model, and a copy of the adapter or None.

    A PeftModel is unloaded in place, since a copy would need the memory of a second base. The
    caller's PeftModel, which wraps the same base, computes with the agents' adapters afterwards.
    Adapters of an agent, merged adapters, and other kinds than plain LoRA raise ConfigError, and
    leave the model unchanged.
    """
    layers = [m for m in network.modules() if isinstance(m, BaseTunerLayer)]
    if not layers:
        return network, None
    problem = ""
    if not isinstance(network, PeftModel) or any(map(_SLOT.fullmatch, network.peft_config)):
        problem = (
            f"this {type(network).__name__} already carries adapters of an agent, or of a "
            f"PeftModel around it; give a PeftModel of your own; {_SHARE}"
        )
    elif len(network.active_adapters) != 1:
        problem = (
            f"expected a PeftModel with one active adapter, got {network.active_adapters}; choose "
            "it with set_adapter(name)"
        )
    if problem:
        raise ConfigError(f"model: {problem}")
    active = network.active_adapters[0]
    config: Any = network.peft_config[active]
    configs.check_lora_config(config)
    if any(layer.merged for layer in layers if isinstance(layer, LoraLayer)):
        raise ConfigError(
            "model: its adapter is merged into the base, which would act twice; call "
            "unmerge_adapter() first"
        )
    tensors: dict[str, Any] = get_peft_model_state_dict(
        network, adapter_name=active, save_embedding_layers=False
    )
    state = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in tensors.items()}
    adapter = AdapterCopy(state, copy.deepcopy(config))
    unload: Any = network.unload
    return unload(), adapter


def trainable(config: LoraConfig) -> LoraConfig:
    """Return a copy of a configuration with `inference_mode` off."""
    unfrozen = copy.deepcopy(config)
    unfrozen.inference_mode = False
    return unfrozen
