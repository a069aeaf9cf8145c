"""Loading an adapter whose LoRA configuration differs from the live slot's.

It is refused, or the two are merged. The merged configuration takes the larger rank and the union
of the modules; in every other field the live value wins, with a warning. Smaller matrices go into
the top-left corner of larger ones, the rest is zero: padded ranks add nothing until they learn. How
strongly an adapter acts depends on lora_alpha and rank: where a merge changes that, it warns.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import Tensor

from evo_grpo.errors import CheckpointError
from evo_grpo.model.adapters import CONFIG, AdapterSlots, check_adapter_state, read_adapter
from evo_grpo.model.base import SharedBase

#: Fields that decide what an adapter computes, apart from rank and modules.
_COMPARED = (
    "lora_alpha",
    "lora_dropout",
    "bias",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "fan_in_fan_out",
)


@dataclass(frozen=True)
class AdapterPlan:
    """An adapter that was read and compared with a slot; putting it there cannot fail any more.

    Attributes:
        slots: The slots.
        name: The slot to overwrite.
        folder: Where it was read.
        state: Every tensor of the slot, by PEFT's file keys.
        config: What the slot is rebuilt with first, None to leave its configuration.
        shapes: Shapes of the slot's parameters afterwards, in their order.
    """

    slots: AdapterSlots
    name: str
    folder: Path
    state: dict[str, Tensor]
    config: LoraConfig | None
    shapes: tuple[torch.Size, ...]

    def apply(self) -> None:
        """Overwrite the slot; its parameters are others when it is rebuilt."""
        if self.config is not None:
            self.slots.rebuild(self.name, self.config)
        self.slots.put(self.name, self.state, self.folder)


def load_adapter(slots: AdapterSlots, name: str, folder: Path, *, merge: bool = False) -> None:
    """Read a PEFT folder into a slot, reconciling configurations if asked.

    See `plan_adapter` for arguments and errors; a refused folder leaves the slot as it was.
    """
    plan_adapter(slots, name, folder, merge=merge).apply()


def plan_adapter(
    slots: AdapterSlots, name: str, folder: Path, *, merge: bool = False
) -> AdapterPlan:
    """Read a PEFT folder and check that it fits a slot, which is not touched.

    Args:
        slots: The slots.
        name: The slot to overwrite.
        folder: Written by `AdapterSlots.save` or by PEFT.
        merge: Merge configurations that differ instead of refusing.

    Raises:
        CheckpointError: Files are missing or damaged, the base is another one, or the
            configurations differ and `merge` is off.
        ConfigError: The merged configuration cannot be trained here.
    """
    state = read_adapter(folder)
    theirs, ours = read_config(folder), slots.lora_config(name)
    different = differences(theirs, ours)
    current = slots.state(name)
    # Before any padding, which would fit a smaller base's matrices into this one's.
    check_base(state, current, folder, slots.base)
    if different and not merge:
        listed = "; ".join(f"{field}: checkpoint {a!r}, live {b!r}" for field, a, b in different)
        raise CheckpointError(
            f"checkpoint {folder}: its LoRA configuration differs from the live one ({listed}); "
            "pass merge_lora_configs=True to reconcile them"
        )
    shapes = tuple(p.shape for p in slots.parameters(name))
    config = None
    if different:
        merged = merged_config(theirs, ours, different)
        if differences(merged, ours):
            config = merged
            current, shapes = _tried(slots, f"{name}_trial", merged)
            check_base(state, current, folder, slots.base)
    state = {
        key: padded(value, current[key]) if key in current else value
        for key, value in state.items()
    }
    for key, value in current.items():
        # Modules the checkpoint does not adapt: an adapter that adds nothing. A tensor that its
        # own configuration promises is missing instead, which the check below reports.
        promised = check_target_module_exists(theirs, _module(key))
        if key not in state and different and not promised:
            state[key] = torch.zeros_like(value) if "lora_B" in key else value
    check_adapter_state(state, current, folder, slots.base.name)
    return AdapterPlan(slots, name, folder, state, config, shapes)


def copy_slot(slots: AdapterSlots, source: str, target: str) -> None:
    """Copy a slot over another one, which takes its configuration too.

    Agents of one population differ in rank or modules after one of them loaded a checkpoint with
    `merge_lora_configs`. A target that is rebuilt has other parameters than before.
    """
    theirs = slots.lora_config(source)
    if differences(theirs, slots.lora_config(target)):
        slots.rebuild(target, theirs)
    slots.copy(source, target)


def read_config(folder: Path) -> LoraConfig:
    """Read adapter_config.json.

    Raises:
        CheckpointError: When it is missing, no JSON, or not LoRA's.
    """
    file = folder / CONFIG
    try:
        named = "peft_type" in json.loads(file.read_text())
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"checkpoint {file}: not a LoRA configuration: {error}") from error
    if not named:
        # PEFT would fill in every missing field, the rank too.
        raise CheckpointError(f"checkpoint {file}: not a LoRA configuration: no peft_type in it")
    try:
        config = LoraConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"checkpoint {folder / CONFIG}: not a LoRA configuration: {error}"
        ) from error
    if not isinstance(config, LoraConfig):
        raise CheckpointError(
            f"checkpoint {folder / CONFIG}: expected peft_type LORA, got {type(config).__name__}"
        )
    return config


def differences(theirs: LoraConfig, ours: LoraConfig) -> list[tuple[str, Any, Any]]:
    """Return (field, theirs, ours) for every field that changes what an adapter computes."""
    pairs: list[tuple[str, Any, Any]] = [("r", theirs.r, ours.r)]
    pairs += [
        (field, _modules(getattr(theirs, field)), _modules(getattr(ours, field)))
        for field in ("target_modules", "modules_to_save")
    ]
    pairs += [(field, getattr(theirs, field), getattr(ours, field)) for field in _COMPARED]
    return [(field, a, b) for field, a, b in pairs if a != b]


def merged_config(
    theirs: LoraConfig, ours: LoraConfig, different: list[tuple[str, Any, Any]]
) -> LoraConfig:
    """Return the larger rank, the union of the modules, and our value of everything else."""
    merged = copy.deepcopy(ours)
    merged.r = max(theirs.r, ours.r)
    merged.inference_mode = False
    modules = set(_modules(theirs.target_modules)) | set(_modules(ours.target_modules))
    merged.target_modules = modules  # pyright: ignore[reportAttributeAccessIssue] -- typed as list, kept by PEFT as set
    for field, checkpoint, live in different:
        if field in _COMPARED:
            warnings.warn(
                f"merge_lora_configs: {field} of the checkpoint is {checkpoint!r}, the live value "
                f"{live!r} stays",
                UserWarning,
                stacklevel=5,
            )
    before, after = _scaling(theirs), _scaling(merged)
    if not math.isclose(before, after):
        warnings.warn(
            f"merge_lora_configs: the checkpoint's adapter was scaled by {before:.4g}, the merged "
            f"one is by {after:.4g} (from lora_alpha and r), so it acts {after / before:.3g} times "
            "as strongly; build the agent with a lora_alpha that keeps the ratio",
            UserWarning,
            stacklevel=5,
        )
    return merged


def padded(value: Tensor, like: Tensor) -> Tensor:
    """Put a smaller matrix into the top-left corner of zeros shaped like the live one."""
    fits = value.ndim == like.ndim and all(
        a <= b for a, b in zip(value.shape, like.shape, strict=True)
    )
    if value.shape == like.shape or not fits:
        return value
    out = torch.zeros_like(like)
    out[tuple(slice(0, n) for n in value.shape)] = value
    return out


def check_base(
    state: dict[str, Tensor], live: dict[str, Tensor], folder: Path, base: SharedBase
) -> None:
    """Compare what the base model decides, whatever the configurations are.

    Raises:
        CheckpointError: When the base lacks a module, or a shared one has other input or output
            features.
    """
    modules = {name for name, _ in base.model.named_modules()}
    for key, value in state.items():
        if ".lora_" in key and _module(key) not in modules:
            raise CheckpointError(
                f"checkpoint {folder}: it adapts {_module(key)}, which {base.name!r} does not "
                "have: it is an adapter of another base model"
            )
        if key not in live or value.ndim != 2:
            continue
        side = 1 if "lora_A" in key else 0
        if value.shape[side] != live[key].shape[side]:
            raise CheckpointError(
                f"checkpoint {folder}: {key} has {value.shape[side]} features where {base.name!r} "
                f"has {live[key].shape[side]} (another hidden size): it is an adapter of another "
                "base model"
            )


def _scaling(config: LoraConfig) -> float:
    """What multiplies B A; the one of a rank_pattern is not looked at."""
    return config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)


def _module(key: str) -> str:
    """Name of the base model's module that a tensor belongs to."""
    return key.removeprefix("base_model.model.").split(".lora_")[0]


def _modules(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(sorted(cast("set[str]", value)))


def _tried(
    slots: AdapterSlots, name: str, config: LoraConfig
) -> tuple[dict[str, Tensor], tuple[torch.Size, ...]]:
    """Return what a slot of a configuration holds, by adding one for a moment."""
    slots.add(name, config, trainable=False)
    try:
        return slots.state(name), tuple(p.shape for p in slots.parameters(name))
    finally:
        slots.remove(name)
