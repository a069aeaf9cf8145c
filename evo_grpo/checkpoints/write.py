"""Writing an agent: a copy of it as it was at one moment, and its files.

<path>/actor/adapter_model.safetensors + adapter_config.json
<path>/reference/...                     where the agent keeps a frozen reference
<path>/attributes.json                   settings, hyperparameters, member, history, base model
<path>/optimizer.safetensors             AdamW's moments, by the names of actor/'s tensors

Nothing is ever pickled.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from evo_grpo.checkpoints.manifest import ATTRIBUTES, FORMAT
from evo_grpo.checkpoints.moments import (
    OPTIMIZER,
    copy_moments,
    count_moments,
    serialise_moments,
)
from evo_grpo.cohort.cohort import Cohort
from evo_grpo.errors import CheckpointError
from evo_grpo.model.digest import base_digest
from evo_grpo.model.lora.files import CONFIG, WEIGHTS, AdapterCopy
from evo_grpo.record.records import SavedAgent
from evo_grpo.validation import shown

_ACTOR_WEIGHTS = f"actor/{WEIGHTS}"


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

    def serialise(self) -> Serialised:
        """Turn the tensors into the bytes of their files, whose digests are known from then on."""
        actor, moments = self.actor.serialise(), serialise_moments(self.optimizer)
        tensors = (
            {_ACTOR_WEIGHTS: actor}
            if moments is None
            else {_ACTOR_WEIGHTS: actor, OPTIMIZER: moments}
        )
        return Serialised(self, tensors, {name: _sha256(data) for name, data in tensors.items()})

    def write(self, path: str | Path) -> dict[str, str]:
        """Write the files; see `Serialised.write`."""
        return self.serialise().write(path)


@dataclass(frozen=True)
class Serialised:
    """A snapshot whose tensors are bytes, so that their digests are known before it is written.

    Attributes:
        snapshot: What it was made of.
        tensors: Contents of the actor's safetensors and, unless it is left out, of
            optimizer.safetensors, by name.
        digests: SHA-256 of each of them.
    """

    snapshot: Snapshot
    tensors: Mapping[str, bytes]
    digests: Mapping[str, str]

    def write(self, path: str | Path) -> dict[str, str]:
        """Write the files; those of an earlier checkpoint in the folder are replaced.

        Returns:
            The SHA-256 of each file, by its name below the folder.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        for part in ("reference", "base"):
            shutil.rmtree(folder / part, ignore_errors=True)
        (folder / OPTIMIZER).unlink(missing_ok=True)
        contents = {**self.tensors, f"actor/{CONFIG}": self.snapshot.actor.config_json()}
        files = {name: self.digests.get(name) or _sha256(data) for name, data in contents.items()}
        (folder / "actor").mkdir(exist_ok=True)
        for name, data in contents.items():
            (folder / name).write_bytes(data)
        if self.snapshot.reference is not None:
            written = self.snapshot.reference.write(folder / "reference")
            files |= {f"reference/{name}": digest for name, digest in written.items()}
        # Last, for it vouches for the others.
        attributes = {**self.snapshot.attributes, "files": dict(sorted(files.items()))}
        data = json.dumps(attributes, indent=1).encode() + b"\n"
        (folder / ATTRIBUTES).write_bytes(data)
        return {**files, ATTRIBUTES: _sha256(data)}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def saved_agent(path: str, digests: Mapping[str, str]) -> SavedAgent:
    """Return a checkpoint as records name it.

    Args:
        path: Its folder, as the record is to hold it.
        digests: Those of its files, as `Serialised` has them.
    """
    return SavedAgent(path, digests[_ACTOR_WEIGHTS], digests.get(OPTIMIZER))


def save_agent(
    cohort: Cohort,
    slot: int,
    path: str | Path,
    *,
    lora_only: bool = True,
    save_optimizer: bool = True,
) -> dict[str, str]:
    """Write an agent.

    Args:
        cohort: Its cohort.
        slot: Its slot.
        path: Folder, created; files of an earlier checkpoint in it are replaced.
        lora_only: Leave out the base, which all agents share; False writes it to `base/`.
        save_optimizer: Write AdamW's moments too.

    Returns:
        The SHA-256 of each file, by its name below the folder; without those of the base. Ranks
        that train together all call it, and the first one writes.

    Raises:
        CheckpointError: attributes.json cannot hold a value; nothing was written.
    """
    snapshot = snapshot_agent(cohort, slot, lora_only=lora_only, save_optimizer=save_optimizer)
    weights = None if lora_only else cohort.base.weights()

    def write() -> dict[str, str]:
        files = snapshot.write(path)
        if weights is not None:
            cohort.base.save(Path(path) / "base", weights)
        return files

    return cohort.team.lead(write) if cohort.together else write()


def snapshot_agent(
    cohort: Cohort, slot: int, *, lora_only: bool = True, save_optimizer: bool = True
) -> Snapshot:
    """Copy what a checkpoint holds; see `save_agent` for the arguments.

    Raises:
        CheckpointError: attributes.json cannot hold a value; before anything is written.
    """
    state = cohort.check_slot(slot)
    names = cohort.slots.shapes(state.adapter)
    moments = copy_moments(state.optimizer, names) if save_optimizer else {}
    attributes = {
        "format": FORMAT,
        "settings": cohort.settings.model_dump(mode="json"),
        "base": cohort.base.name,
        "base_digest": base_digest(cohort.base),
        "dtype": str(cohort.base.dtype).removeprefix("torch."),
        "vocabulary": cohort.base.vocabulary,
        "hparams": state.hparams.to_dict(),
        "member": asdict(state.member),
        "history": [asdict(score) for score in state.history],
        "steps": state.steps,
        "reference_updates": state.reference_updates,
        "has_optimizer": save_optimizer,
        "moments": count_moments(moments),
        "lora_only": lora_only,
        "objects": list(cohort.objects),
        "padding": cohort.base.padding,
    }
    _check_json(attributes)
    return Snapshot(
        actor=cohort.slots.snapshot(state.adapter),
        reference=cohort.slots.snapshot(state.reference) if state.has_reference else None,
        optimizer=moments,
        attributes=attributes,
    )


def _check_json(value: object, name: str = "") -> None:
    """Refuse what JSON cannot hold while an earlier checkpoint is still whole."""
    if isinstance(value, dict):
        for key, entry in cast("dict[object, object]", value).items():
            _check_json(entry, f"{name}.{key}" if name else str(key))
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{ATTRIBUTES}: {name}: expected what JSON can hold, got {shown(value)}: {error}; give "
            "the agent Python's own numbers, strings, lists and mappings; nothing was written"
        ) from error
