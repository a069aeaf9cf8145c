"""An agent on disk: PEFT folders, attributes.json, optimizer.safetensors.

Nothing is ever pickled or unpickled.

<path>/actor/adapter_model.safetensors + adapter_config.json
<path>/reference/...                     where the agent keeps a frozen reference
<path>/attributes.json                   hyperparameters, member, history, base model
<path>/optimizer.safetensors             AdamW's moments, by parameter position
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from evo_grpo.errors import CheckpointError
from evo_grpo.grpo.cohort import Cohort
from evo_grpo.grpo.optimizer_files import OPTIMIZER, copy_moments, read_moments, write_moments
from evo_grpo.hparams import Hparams
from evo_grpo.model.adapters import AdapterCopy
from evo_grpo.model.reconcile import plan_adapter
from evo_grpo.records import Score, score_from_json

FORMAT = 1
ATTRIBUTES = "attributes.json"


@dataclass(frozen=True)
class Digests:
    """What tells whether a checkpoint's files are still those that were written.

    Attributes:
        adapter_sha256: SHA-256 of the actor's safetensors.
        optimizer_sha256: SHA-256 of optimizer.safetensors, None where there is none.
    """

    adapter_sha256: str
    optimizer_sha256: str | None


@dataclass(frozen=True)
class Snapshot:
    """An agent as it was at one moment: copies on the CPU, so it can be written while others train.

    Attributes:
        actor: The trained slot.
        reference: The frozen reference slot, where the agent keeps one.
        optimizer: AdamW's moments by file key; empty to leave them out.
        attributes: What attributes.json holds, apart from the digests.
    """

    actor: AdapterCopy
    reference: AdapterCopy | None
    optimizer: dict[str, torch.Tensor]
    attributes: dict[str, Any]

    def write(self, path: str | Path) -> Digests:
        """Write the files; those of an earlier checkpoint in the folder are replaced."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        adapter = self.actor.write(folder / "actor")
        shutil.rmtree(folder / "reference", ignore_errors=True)
        shutil.rmtree(folder / "base", ignore_errors=True)
        if self.reference is not None:
            self.reference.write(folder / "reference")
        digests = Digests(adapter, write_moments(self.optimizer, folder))
        attributes = {**self.attributes, **asdict(digests)}
        (folder / ATTRIBUTES).write_text(json.dumps(attributes, indent=1) + "\n")
        return digests


def snapshot_agent(
    cohort: Cohort,
    slot: int,
    *,
    lora_only: bool = True,
    save_optimizer: bool = True,
    arguments: Mapping[str, Any] | None = None,
) -> Snapshot:
    """Copy what a checkpoint holds; see `save_agent` for the arguments."""
    state = cohort.check_slot(slot)
    return Snapshot(
        actor=cohort.slots.snapshot(state.adapter),
        reference=cohort.slots.snapshot(state.reference) if state.has_reference else None,
        optimizer=copy_moments(state.optimizer) if save_optimizer else {},
        attributes={
            "format": FORMAT,
            "base": cohort.base.name,
            "vocabulary": cohort.base.vocabulary,
            "hparams": state.hparams.to_dict(),
            "member": asdict(state.member),
            "history": [asdict(score) for score in state.history],
            "steps": state.steps,
            "reference_updates": state.reference_updates,
            "has_optimizer": save_optimizer,
            "lora_only": lora_only,
            "arguments": {k: v for k, v in (arguments or {}).items() if _plain(v)},
        },
    )


def save_agent(
    cohort: Cohort,
    slot: int,
    path: str | Path,
    *,
    lora_only: bool = True,
    save_optimizer: bool = True,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Write an agent.

    Args:
        cohort: Its cohort.
        slot: Its slot.
        path: Folder, created; files of an earlier checkpoint in it are replaced.
        lora_only: Leave out the base, which all agents share; False writes it to `base/`.
        save_optimizer: Write AdamW's moments too.
        arguments: The constructor's arguments, kept where they are JSON-able.

    Returns:
        The SHA-256 of the actor's safetensors.
    """
    snapshot = snapshot_agent(
        cohort, slot, lora_only=lora_only, save_optimizer=save_optimizer, arguments=arguments
    )
    digests = snapshot.write(path)
    if not lora_only:
        cohort.base.save(Path(path) / "base")
    return digests.adapter_sha256


def load_agent(
    cohort: Cohort,
    slot: int,
    path: str | Path,
    *,
    load_optimizer: bool = False,
    overwrite_reference_adapter: bool = False,
    merge_lora_configs: bool = False,
) -> dict[str, Any]:
    """Read an agent into a slot: weights, hyperparameters and, if asked, the optimizer.

    Everything is read and checked before the slot is touched.

    Args:
        cohort: The cohort to load into.
        slot: The slot to overwrite; no other slot changes.
        path: Folder written by `save_agent`.
        load_optimizer: Restore AdamW's moments; without them in the checkpoint a warning and fresh
            ones.
        overwrite_reference_adapter: Take the checkpoint's actor as the reference even when it
            carries one.
        merge_lora_configs: Reconcile a LoRA configuration that differs from the live one.

    Returns:
        The attributes as written.

    Raises:
        CheckpointError: When files are missing, truncated, or belong to another model.
    """
    folder = Path(path)
    state = cohort.check_slot(slot)
    attributes = read_attributes(folder)
    if attributes["vocabulary"] != cohort.base.vocabulary:
        raise CheckpointError(
            f"checkpoint {folder}: made for base {attributes['base']!r} with a vocabulary of "
            f"{attributes['vocabulary']}, but {cohort.base.name!r} has {cohort.base.vocabulary}; "
            "load it over its own base model"
        )
    if (folder / "base").is_dir():
        cohort.base.check_same(folder / "base")
    # All is read and checked here; from `apply` on, nothing is refused any more.
    hparams, history, steps = _read_state(attributes, folder)
    plans = [plan_adapter(cohort.slots, state.adapter, folder / "actor", merge=merge_lora_configs)]
    if state.has_reference:
        own = (folder / "reference").is_dir() and not overwrite_reference_adapter
        source = folder / ("reference" if own else "actor")
        plans.append(plan_adapter(cohort.slots, state.reference, source, merge=True))
    elif (folder / "reference").is_dir():
        warnings.warn(
            f"checkpoint {folder}: its reference adapter is left out, since this agent's reference "
            "is the base with adapters off; build it with use_separate_reference_adapter=True",
            UserWarning,
            stacklevel=3,
        )
    moments = read_moments(folder, plans[0].shapes) if load_optimizer else {}
    if load_optimizer and not moments and attributes.get("optimizer_sha256"):
        raise CheckpointError(
            f"checkpoint {folder}: {OPTIMIZER} is missing; put it back, or load without "
            "load_optimizer to start AdamW afresh"
        )
    if load_optimizer and not moments and steps and not attributes.get("has_optimizer"):
        warnings.warn(
            f"checkpoint {folder} holds no optimizer state (saved with save_optimizer=False): "
            "AdamW starts afresh",
            UserWarning,
            stacklevel=3,
        )
    for plan in plans:
        plan.apply()
    state.optimizer = cohort.fresh_optimizer(slot, hparams)
    if moments:
        state.optimizer.load_state_dict(
            {"state": moments, "param_groups": state.optimizer.state_dict()["param_groups"]}
        )
    cohort.set_hparams(slot, hparams)
    state.history = history
    state.steps = steps
    # Checkpoints of the first days do not hold it.
    state.reference_updates = int(attributes.get("reference_updates", 0))
    return attributes


def read_attributes(folder: Path) -> dict[str, Any]:
    """Read attributes.json.

    Raises:
        CheckpointError: When the folder or file is missing, not JSON, or somebody else's pickle.
    """
    file = folder / ATTRIBUTES
    if not file.is_file():
        foreign = (folder / "attributes.pt").is_file()
        why = (
            "; attributes.pt is a pickle, which can run code when read and is never loaded: load "
            "its actor/ folder with PeftModel.from_pretrained and save it again"
            if foreign
            else "; expected a folder written by save_checkpoint"
        )
        raise CheckpointError(f"checkpoint {folder}: {ATTRIBUTES} is missing{why}")
    try:
        data: Any = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"checkpoint {file}: not JSON, it may be truncated: {error}"
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError(
            f"checkpoint {file}: expected a mapping as save_checkpoint writes it, got {data!r:.60}"
        )
    missing = {"format", "base", "vocabulary", "hparams", "member", "history", "steps"} - set(data)
    if missing or data["format"] != FORMAT:
        raise CheckpointError(
            f"checkpoint {file}: expected format {FORMAT}, got {data.get('format')!r}; "
            f"missing {sorted(missing)}"
        )
    return data


def _read_state(attributes: Mapping[str, Any], folder: Path) -> tuple[Hparams, list[Score], int]:
    """Hyperparameters, history and steps of attributes.json."""
    try:
        history = [score_from_json(score) for score in attributes["history"]]
        return Hparams.from_dict(attributes["hparams"]), history, int(attributes["steps"])
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {folder / ATTRIBUTES}: hparams, history or steps are not what "
            f"save_checkpoint writes: {error}"
        ) from error


def _plain(value: object) -> bool:
    """Return whether a constructor argument can be written as JSON and read back equal."""
    return value is None or isinstance(value, bool | int | float | str)
