"""Loading an adapter whose LoRA configuration differs from the live slot's.

It is refused, or the two are merged. The merged configuration takes the larger rank and the union
of the modules; rank_pattern must be the same, and in every other field the live value wins, with a
warning. Smaller matrices go into the top-left corner of a fresh slot's: where the checkpoint has no
rank or module, A is random and B is zero. That adds nothing, and has a gradient; with A and B both
zero, each would keep the gradient of the other at zero for ever. How strongly an adapter acts
depends on lora_alpha and rank: where a merge changes that, it warns.
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
from evo_grpo.model.lora.from_peft import trainable
from evo_grpo.model.lora.slots import AdapterSlots, check_adapter_state


@dataclass(frozen=True)
class AdapterPlan:
    """An adapter that was read and compared with a slot; putting it there cannot fail any more.

    Attributes:
        state: Every tensor of the slot, by PEFT's file keys.
        config: New configuration of the slot, None to keep its own.
        shapes: Shapes of the slot's parameters afterwards by PEFT's file keys, in their order.
        own: Shapes of the adapter's own tensors, as they were read.
        notes: Warnings for the user.
    """

    slots: AdapterSlots
    name: str
    origin: Path
    state: dict[str, Tensor]
    config: LoraConfig | None
    shapes: dict[str, torch.Size]
    own: dict[str, torch.Size]
    notes: tuple[str, ...]

    def apply(self) -> None:
        """Overwrite the slot; a rebuilt slot has new parameters."""
        if self.config is not None:
            self.slots.rebuild(self.name, self.config)
        self.slots.put(self.name, self.state, self.origin)


def plan_adapter(
    slots: AdapterSlots, name: str, folder: Path, *, merge: bool = False
) -> AdapterPlan:
    """Read a PEFT folder and check that it fits a slot, which is not touched; see `plan_copy`.

    CheckpointError is raised where files are missing or damaged.
    """
    state = read_adapter(folder)
    return plan_copy(slots, name, AdapterCopy(state, read_config(folder)), folder, merge=merge)


def plan_copy(
    slots: AdapterSlots, name: str, adapter: AdapterCopy, origin: Path, *, merge: bool = False
) -> AdapterPlan:
    """Check that an adapter at hand, of a PEFT folder, fits a slot.

    With `merge`, configurations that differ are merged instead of refused. CheckpointError is
    raised where the base is another one, ConfigError where the merged configuration cannot be
    trained here.
    """
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
        # Fresh even where the slot keeps its configuration: what it has learned is not loaded.
        current, shapes = _fresh_state(slots, f"{name}_trial", merged)
        state = {k: padded(v, current[k]) if k in current else v for k, v in state.items()}
        for key, value in current.items():
            # Modules the checkpoint does not adapt: an adapter that adds nothing. A tensor that
            # its own configuration promises is missing instead, which the check below reports.
            if key not in state and module_of(key) not in wanted:
                state[key] = value
    check_adapter_state(state, current, origin, slots.base.name)
    broken = next((key for key, value in state.items() if not value.isfinite().all()), None)
    if broken is not None:
        notes.append(
            f"checkpoint {origin}: {broken} holds numbers that are not finite; what it generates "
            "and learns is undefined. Load an earlier checkpoint"
        )
    return AdapterPlan(slots, name, origin, state, config, shapes, own, tuple(notes))


def copy_slot(slots: AdapterSlots, source: str, target: str) -> None:
    """Copy a slot over another one, which takes its configuration too.

    Agents of one population differ in rank or modules after one of them loaded a checkpoint with
    `merge_lora_configs`. A target that is rebuilt has other parameters than before.
    """
    suit_slot(slots, target, slots.lora_config(source))
    slots.copy(source, target)


def suit_slot(slots: AdapterSlots, name: str, config: LoraConfig) -> None:
    """Rebuild a slot whose configuration is another one; its parameters are others then."""
    if differences(config, slots.lora_config(name)):
        slots.rebuild(name, trainable(config))


def mix_slots(slots: AdapterSlots, sources: Sequence[str], target: str) -> None:
    """Give a slot the mean of the matrices of others, which have equal shapes.

    The mean of A and of B, not of their products: it stands for one adapter of the same rank where
    the sources are close to each other, as relatives are.
    """
    copy_slot(slots, sources[0], target)
    states = [slots.state(name) for name in sources]
    mean = {key: torch.stack([s[key] for s in states]).mean(dim=0) for key in states[0]}
    slots.put(target, mean, Path("mean"))


def padded(value: Tensor, fresh: Tensor) -> Tensor:
    """Put a smaller matrix into the top-left corner of a fresh one, whose B is zero."""
    fits = value.ndim == fresh.ndim and all(
        a <= b for a, b in zip(value.shape, fresh.shape, strict=True)
    )
    if value.shape == fresh.shape or not fits:
        return value
    out = fresh.clone()
    out[tuple(slice(0, n) for n in value.shape)] = value
    return out


def check_base(
    state: dict[str, Tensor], live: dict[str, Tensor], folder: Path, base: SharedBase
) -> None:
    """Compare what the base model decides, whatever the configurations are.

    That is which modules there are, and the input or output features of shared ones.
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


def _fresh_state(
    slots: AdapterSlots, name: str, config: LoraConfig
) -> tuple[dict[str, Tensor], dict[str, torch.Size]]:
    """Return what a new slot of a configuration holds, with B = 0 whatever PEFT starts it with."""
    slots.add(name, config, trainable=False)
    try:
        state, shapes = slots.state(name), slots.shapes(name)
    finally:
        slots.remove(name)
    return {k: torch.zeros_like(v) if ".lora_B." in k else v for k, v in state.items()}, shapes
