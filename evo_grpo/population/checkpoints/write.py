"""Writes an agent: copies its state at one moment, and writes the files of a checkpoint.

<path>/actor/adapter_model.safetensors + adapter_config.json
<path>/reference/...                     an adapter as reference; in a run, only the agent's own
<path>/attributes.json                   settings, hyperparameters, member, history, base model
<path>/optimizer.safetensors             AdamW's moments, by the names of actor/'s tensors

Nothing is ever pickled.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from evo_grpo.model.digest import base_digest
from evo_grpo.model.lora.adapter_files import WEIGHTS, AdapterCopy, write_tensors
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.state import AgentTensors, copy_tensors
from evo_grpo.record.names import ATTRIBUTES
from evo_grpo.types import Score

FORMAT = 3
"""Version of attributes.json."""
OPTIMIZER = "optimizer.safetensors"
ACTOR_WEIGHTS = f"actor/{WEIGHTS}"


@dataclass(frozen=True)
class Snapshot:
    """The state of an agent at one moment; `attributes` is attributes.json without the digests."""

    tensors: AgentTensors
    attributes: dict[str, Any]

    def with_history(self, history: Sequence[Score]) -> Snapshot:
        """Return a copy that has another history and shares the tensors."""
        attributes = {**self.attributes, "history": [asdict(score) for score in history]}
        return replace(self, attributes=attributes)

    def to_send(self) -> Snapshot:
        """Return a copy whose tensors are no views: a pickled view contains its whole storage."""

        def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor.clone() for name, tensor in tensors.items()}

        def adapter(copied: AdapterCopy) -> AdapterCopy:
            return replace(copied, state=apart(copied.state))

        tensors = self.tensors
        tensors = replace(
            tensors,
            actor=adapter(tensors.actor),
            reference=None if tensors.reference is None else adapter(tensors.reference),
            moments={place: apart(values) for place, values in tensors.moments.items()},
        )
        return replace(self, tensors=tensors)

    def write(self, path: str | Path) -> dict[str, str]:
        """Write the files, over those of an old checkpoint; return SHA-256 by path below `path`."""
        # A value that JSON cannot represent is an error before any file is written.
        json.dumps(self.attributes)
        folder = Path(path)
        for part in ("reference", "base"):
            shutil.rmtree(folder / part, ignore_errors=True)
        (folder / OPTIMIZER).unlink(missing_ok=True)
        adapters = {"actor": self.tensors.actor, "reference": self.tensors.reference}
        files: dict[str, str] = {}
        for part, adapter in adapters.items():
            if adapter is not None:
                (folder / part).mkdir(parents=True, exist_ok=True)
                written = adapter.write(folder / part)
                files |= {f"{part}/{name}": digest for name, digest in written.items()}
        if self.tensors.moments:
            files[OPTIMIZER] = write_tensors(self._moments(), folder / OPTIMIZER)
        files = dict(sorted(files.items()))
        attributes = json.dumps({**self.attributes, "files": files}, indent=1).encode() + b"\n"
        # Written last, since it has the digests of the other files.
        (folder / ATTRIBUTES).write_bytes(attributes)
        return {**files, ATTRIBUTES: hashlib.sha256(attributes).hexdigest()}

    def _moments(self) -> dict[str, Tensor]:
        """Return AdamW's moments by name: the adapter's tensor in PEFT's file, then the moment."""
        keys = list(self.tensors.actor.state)
        return {
            f"{keys[place]}.{name}": value
            for place, values in self.tensors.moments.items()
            for name, value in values.items()
        }


def save_agent(
    cohort: Cohort,
    slot: int,
    path: str | Path,
    *,
    lora_only: bool = True,
    save_optimizer: bool = True,
) -> dict[str, str]:
    """Write an agent to a folder, over an old checkpoint; return SHA-256 by path in the folder.

    Without `lora_only`, the shared base is saved too, in `base/`; its digests are not returned. All
    ranks that train together call this function; rank 0 writes.
    """
    snapshot = snapshot_agent(
        cohort, slot, lora_only=lora_only, save_optimizer=save_optimizer, start=True
    )
    weights = None if lora_only else cohort.base.weights()

    def write(_: object) -> dict[str, str]:
        files = snapshot.write(path)
        if weights is not None:
            cohort.base.save(Path(path) / "base", weights)
        return files

    return cohort.team.agree(None, write) if cohort.trains_jointly else write(None)


def snapshot_again(cohort: Cohort, slot: int, earlier: Snapshot | None) -> Snapshot:
    """Return `earlier` with the agent's current scores; without `earlier`, a new snapshot.

    The agent's weights must not have changed since `earlier`.
    """
    if earlier is None:
        return snapshot_agent(cohort, slot)
    return earlier.with_history(cohort.agents[slot].history)


def snapshot_agent(
    cohort: Cohort,
    slot: int,
    *,
    lora_only: bool = True,
    save_optimizer: bool = True,
    start: bool = False,
) -> Snapshot:
    """Copy the state that a checkpoint contains; see `save_agent` for the arguments.

    With `start`, the reference is copied even if it is the adapter that all agents started from.
    """
    state = cohort.check_slot(slot)
    tensors = copy_tensors(
        cohort.slots,
        state,
        moments=save_optimizer,
        reference=cohort.references.of(state) if start else None,
    )
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
        **state.counters,
        "calls": cohort.calls,
        "reference": "own" if state.has_reference else cohort.references.of(state) or "base",
        "has_optimizer": save_optimizer,
        "lora_only": lora_only,
        "objects": list(cohort.objects),
        "padding": cohort.base.padding,
    }
    return Snapshot(tensors, attributes)
