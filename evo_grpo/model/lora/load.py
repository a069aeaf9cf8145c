"""Loading an adapter whose LoRA configuration differs from the live slot's.

It is refused, or the two are merged. The merged configuration takes the larger rank and the union
of the modules; rank_pattern must be the same, and in every other field the live value wins, with a
warning. Smaller matrices go into the top-left corner of larger ones, the rest is zero: padded ranks
add nothing until they learn. How strongly an adapter acts depends on lora_alpha and rank: where a
merge changes that, it warns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from torch import Tensor

from evo_grpo.errors import CheckpointError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.lora.configs import (
    adapted_modules,
    differences,
    merged_config,
    module_of,
    only_names_modules,
    rank_of,
    read_config,
)
from evo_grpo.model.lora.files import CONFIG, AdapterCopy, read_adapter
from evo_grpo.model.lora.slots import AdapterSlots, check_adapter_state


@dataclass(frozen=True)
class AdapterPlan:
    """An adapter that was read and compared with a slot; putting it there cannot fail any more.

    Attributes:
        slots: The slots.
        name: The slot to overwrite.
        origin: Where it was read.
        state: Every tensor of the slot, by PEFT's file keys.
        config: New configuration of the slot, None to keep its own.
        shapes: Shapes of the slot's parameters afterwards by PEFT's file keys, in their order.
        own: Shapes of the adapter's own tensors, as they were read.
        merged: Whether its configuration differs from the slot's.
        notes: Warnings for the user.
    """

    slots: AdapterSlots
    name: str
    origin: Path
    state: dict[str, Tensor]
    config: LoraConfig | None
    shapes: dict[str, torch.Size]
    own: dict[str, torch.Size]
    merged: bool
    notes: tuple[str, ...]

    def apply(self) -> None:
        """Overwrite the slot; a rebuilt slot has new parameters."""
        if self.config is not None:
            self.slots.rebuild(self.name, self.config)
        self.slots.put(self.name, self.state, self.origin)


def plan_adapter(
    slots: AdapterSlots, name: str, folder: Path, *, merge: bool = False
) -> AdapterPlan:
    """Read a PEFT folder and check that it fits a slot, which is not touched.

    Args:
        slots: The slots.
        name: The slot to overwrite.
        folder: Written by `AdapterCopy.write` or by PEFT.
        merge: Merge configurations that differ instead of refusing.

    Raises:
        CheckpointError: Files are missing or damaged, the base is another one, or the
            configurations differ and `merge` is off.
        ConfigError: The merged configuration cannot be trained here.
    """
    state = read_adapter(folder)
    return plan_copy(slots, name, AdapterCopy(state, read_config(folder)), folder, merge=merge)


def plan_copy(
    slots: AdapterSlots, name: str, adapter: AdapterCopy, origin: Path, *, merge: bool = False
) -> AdapterPlan:
    """Check that an adapter at hand fits a slot; see `plan_adapter`."""
    state, theirs, ours = adapter.state, adapter.config, slots.lora_config(name)
    current, shapes = slots.state(name), slots.shapes(name)
    # Before any padding, which would fit a smaller base's matrices into this one's.
    check_base(state, current, origin, slots.base)
    wanted = adapted_modules(slots.base.model, theirs)
    live = {module_of(key) for key in current}
    different = [
        d for d in differences(theirs, ours) if wanted != live or not only_names_modules(d[0])
    ]
    if different and not merge:
        listed = "; ".join(f"{field}: checkpoint {a!r}, live {b!r}" for field, a, b in different)
        raise CheckpointError(
            f"checkpoint {origin}: its LoRA configuration differs from the live one ({listed}); "
            "pass merge_lora_configs=True to reconcile them"
        )
    if different and theirs.rank_pattern != ours.rank_pattern:
        raise CheckpointError(
            f"checkpoint {origin}: expected the live rank_pattern {ours.rank_pattern}, got "
            f"{theirs.rank_pattern}; merge_lora_configs pads to one r alone: build the agent with "
            "the checkpoint's rank_pattern"
        )
    _check_ranks(state, theirs, origin)
    own = {key: value.shape for key, value in state.items()}
    config, notes = None, list[str]()
    if different:
        merged, notes = merged_config(theirs, ours, wanted, live)
        if differences(merged, ours):
            config = merged
            current, shapes = _state_of_trial_slot(slots, f"{name}_trial", merged)
        state = {k: padded(v, current[k]) if k in current else v for k, v in state.items()}
        for key, value in current.items():
            # Modules the checkpoint does not adapt: an adapter that adds nothing. A tensor that
            # its own configuration promises is missing instead, which the check below reports.
            if key not in state and module_of(key) not in wanted:
                state[key] = torch.zeros_like(value) if "lora_B" in key else value
    check_adapter_state(state, current, origin, slots.base.name)
    broken = next((key for key, value in state.items() if not value.isfinite().all()), None)
    if broken is not None:
        notes.append(
            f"checkpoint {origin}: {broken} holds numbers that are not finite; what it generates "
            "and learns is undefined. Load an earlier checkpoint"
        )
    return AdapterPlan(
        slots, name, origin, state, config, shapes, own, bool(different), tuple(notes)
    )


def copy_slot(slots: AdapterSlots, source: str, target: str) -> None:
    """Copy a slot over another one, which takes its configuration too.

    Agents of one population differ in rank or modules after one of them loaded a checkpoint with
    `merge_lora_configs`. A target that is rebuilt has other parameters than before.
    """
    theirs = slots.lora_config(source)
    if differences(theirs, slots.lora_config(target)):
        slots.rebuild(target, theirs)
    slots.copy(source, target)


def mix_slots(slots: AdapterSlots, sources: Sequence[str], target: str) -> None:
    """Give a slot the mean of the matrices of others, which have equal shapes.

    The mean of A and of B, not of their products: it stands for one adapter of the same rank where
    the sources are close to each other, as relatives are.
    """
    copy_slot(slots, sources[0], target)
    states = [slots.state(name) for name in sources]
    mean = {key: torch.stack([s[key] for s in states]).mean(dim=0) for key in states[0]}
    slots.put(target, mean, Path("mean"))


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
        if ".lora_" in key and module_of(key) not in modules:
            raise CheckpointError(
                f"checkpoint {folder}: it adapts {module_of(key)}, which {base.name!r} does not "
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


def _check_ranks(state: dict[str, Tensor], config: LoraConfig, origin: Path) -> None:
    """Compare tensors with the configuration they came with; zeros would hide a lost row."""
    for key, value in state.items():
        side = 0 if ".lora_A." in key else 1
        rank = rank_of(config, module_of(key))
        if value.ndim == 2 and ".lora_" in key and value.shape[side] != rank:
            raise CheckpointError(
                f"checkpoint {origin}: {key} has shape {tuple(value.shape)}, but its own {CONFIG} "
                f"says rank r={rank}; expected tensors and configuration of one adapter: put both "
                "files back as they were saved"
            )


def _state_of_trial_slot(
    slots: AdapterSlots, name: str, config: LoraConfig
) -> tuple[dict[str, Tensor], dict[str, torch.Size]]:
    """Return what a slot of a configuration holds, by adding one for a moment."""
    slots.add(name, config, trainable=False)
    try:
        return slots.state(name), slots.shapes(name)
    finally:
        slots.remove(name)
