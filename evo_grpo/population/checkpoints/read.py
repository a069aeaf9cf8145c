"""Reading an agent into a slot: from a checkpoint, see `write`, or from a plain PEFT folder."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.digest import base_digest, comparable_digests
from evo_grpo.model.lora.configs import read_config
from evo_grpo.model.lora.files import read_adapter
from evo_grpo.model.lora.load import AdapterPlan, plan_adapter
from evo_grpo.population.checkpoints.manifest import (
    ATTRIBUTES,
    peft_folder,
    read_attributes,
    read_state,
)
from evo_grpo.population.checkpoints.moments import OPTIMIZER, read_moments
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.state import START
from evo_grpo.record.digests import check_digests


def load_agent(
    cohort: Cohort,
    slot: int,
    path: str | Path,
    *,
    load_optimizer: bool = False,
    overwrite_reference_adapter: bool = False,
    merge_lora_configs: bool = False,
) -> dict[str, Any]:
    """Read an agent into a slot: weights, hyperparameters and, if asked, AdamW's moments.

    Everything is read and checked before the slot is touched; no other slot changes. The folder is
    one of `save_agent`, or a plain PEFT folder (flat, or under actor/), whose weights become the
    actor and the reference. `overwrite_reference_adapter` takes the checkpoint's actor as the
    reference even when it carries one, `merge_lora_configs` reconciles a LoRA configuration that
    differs from the live one.

    Returns:
        The attributes as written; none of a PEFT folder.

    Raises:
        CheckpointError: When files are missing, truncated, or belong to another model.
        ConfigError: With engine.zero, when the agent would get other ranks or modules.
    """
    folder = Path(path)
    state = cohort.check_slot(slot)
    plain = peft_folder(folder)
    # All is read and checked here; from `apply` on, nothing is refused any more.
    attributes = read_attributes(folder) if plain is None else {}
    notes = _check_base(attributes, folder, cohort.base) if plain is None else []
    read = read_state(attributes, folder) if plain is None else None
    actor = plan_adapter(
        cohort.slots, state.adapter, plain or folder / "actor", merge=merge_lora_configs
    )
    if plain is not None:
        notes.append(_about_peft(folder, read_config(plain), cohort.base))
    _check_turns(cohort, actor)
    own = any(name.startswith("reference/") for name in attributes.get("files", ()))
    plans = [actor]
    if state.has_reference:
        source = folder / "reference" if own and not overwrite_reference_adapter else actor.origin
        plans.append(plan_adapter(cohort.slots, state.reference, source, merge=True))
    else:
        notes += _about_reference(cohort, folder, attributes, own=own)
    moments: dict[int, dict[str, torch.Tensor]] = {}
    if load_optimizer and plain is None:
        moments = _read_moments(attributes, folder, actor, notes)
    if plain is None:
        _check_digests(attributes, folder, overwrite_reference_adapter)
    # The actor and its reference often give the same notes.
    for note in dict.fromkeys([*notes, *(note for plan in plans for note in plan.notes)]):
        warnings.warn(note, UserWarning, stacklevel=3)
    for plan in plans:
        plan.apply()
    hparams = state.hparams if read is None else read[0]
    state.optimizer = cohort.fresh_optimizer(slot, hparams)
    if moments:
        state.optimizer.load_state_dict(
            {"state": moments, "param_groups": state.optimizer.state_dict()["param_groups"]}
        )
    if read is not None:
        cohort.set_hparams(slot, hparams)
        _, state.history, state.steps = read
        state.reference_updates = int(attributes["reference_updates"])
    return attributes


def _about_reference(
    cohort: Cohort, folder: Path, attributes: Mapping[str, Any], *, own: bool
) -> list[str]:
    """Say which reference of a checkpoint an agent does not get that keeps none of its own."""
    here = (
        "the adapter that it started from"
        if cohort.references.start
        else "the base with adapters off"
    )
    remedy = "build it with separate_reference=True"
    if own:
        if cohort.references.start and _is_start(cohort, read_adapter(folder / "reference")):
            return []
        return [
            f"checkpoint {folder}: its reference adapter is left out, since this agent's reference "
            f"is {here}; {remedy}"
        ]
    if attributes.get("reference") == START and not cohort.references.start:
        return [
            f"checkpoint {folder}: its reference was the adapter that its agents started from, "
            f"which a run does not copy into its checkpoints; this agent's is {here}. To train on "
            "towards that adapter, build the agent with adapter=, and call load_checkpoint"
        ]
    return []


def _is_start(cohort: Cohort, reference: Mapping[str, torch.Tensor]) -> bool:
    start = cohort.slots.state(START)
    return start.keys() == reference.keys() and all(
        torch.equal(value, reference[key]) for key, value in start.items()
    )


def _check_turns(cohort: Cohort, actor: AdapterPlan) -> None:
    """Refuse other ranks or modules where all agents train through one adapter of DeepSpeed's."""
    if cohort.together and actor.config is not None:
        raise ConfigError(
            f"checkpoint {actor.origin}: expected the ranks and modules of this population's "
            "agents, got others, which merge_lora_configs would add; with engine.zero all agents "
            "train through one adapter of DeepSpeed's: build them with the checkpoint's lora"
        )


def _check_base(attributes: Mapping[str, Any], folder: Path, base: SharedBase) -> list[str]:
    """Compare a checkpoint's base with the live one; returns what to warn of.

    The weights decide, by a digest: a folder may have been moved. Where there is none of the same
    kind, the names do.
    """
    if attributes["vocabulary"] != base.vocabulary:
        raise CheckpointError(
            f"checkpoint {folder}: made for base {attributes['base']!r} with a vocabulary of "
            f"{attributes['vocabulary']}, but {base.name!r} has {base.vocabulary}; "
            "load it over its own base model"
        )
    if (folder / "base").is_dir():
        base.check_same(folder / "base")
        return []
    saved, live = str(attributes["base_digest"]), base_digest(base)
    if comparable_digests(saved, live):
        other, what = saved != live, "whose weights are others"
    else:
        other, what = attributes["base"] != base.name, "by its name another one"
    if not other:
        return []
    return [
        f"checkpoint {folder}: its adapter was trained over base {attributes['base']!r}, this "
        f"agent's base is {base.name!r}, {what}: an adapter means nothing over another base; load "
        "it over its own"
    ]


def _check_digests(attributes: Mapping[str, Any], folder: Path, without_reference: bool) -> None:
    """Compare the adapters that were read with what attributes.json says of them."""
    read = {
        name: digest
        for name, digest in attributes["files"].items()
        if name != OPTIMIZER and not (without_reference and name.startswith("reference/"))
    }
    weights = folder / "actor"
    check_digests(
        folder,
        read,
        f"{ATTRIBUTES} names",
        f"or take the weights alone: load_checkpoint({str(weights)!r})",
    )


def _about_peft(folder: Path, config: LoraConfig, base: SharedBase) -> str:
    """Say what a PEFT folder lacks, and which base it belongs to where that differs."""
    named = str(config.base_model_name_or_path or "")
    # Paths of one model differ from machine to machine, and an embedded one is known by its name.
    other = named and Path(named).name != Path(base.name).name
    return (
        f"checkpoint {folder}: a PEFT folder, so its weights are taken alone: hyperparameters, "
        "steps and history stay as they are, AdamW starts afresh"
    ) + (
        f". It says that its base is {named!r}, this agent's is {base.name!r}: an adapter means "
        "nothing over another base"
        if other
        else ""
    )


def _read_moments(
    attributes: Mapping[str, Any], folder: Path, actor: AdapterPlan, notes: list[str]
) -> dict[int, dict[str, torch.Tensor]]:
    """Read the moments that a checkpoint should have; add a note where it has none."""
    if OPTIMIZER in attributes["files"]:
        remedy = "or load without load_optimizer to start AdamW afresh"
        own = {OPTIMIZER: attributes["files"][OPTIMIZER]}
        check_digests(folder, own, f"{ATTRIBUTES} names", remedy)
        return read_moments(folder, actor)
    if attributes["steps"] and not attributes["has_optimizer"]:
        notes.append(
            f"checkpoint {folder} holds no optimizer state (saved with save_optimizer=False): "
            "AdamW starts afresh"
        )
    return {}
