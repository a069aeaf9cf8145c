"""Writes adapters for vLLM: a folder, a name and an id for each version of each adapter.

vLLM has separate caches keyed by an adapter's name, path and id: an old id with a new path returns
the old weights, and an old name the old keys and values. So all three are used only once.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from evo_grpo.model.lora.files import CONFIG, WEIGHTS, write_tensors
from evo_grpo.model.lora.slots import AdapterSlots

_IDS = count(1)
"""Ids for vLLM, 1, 2, ...; shared, since one vLLM may serve several engines of a process."""


@dataclass(frozen=True)
class Published:
    """One version of an adapter, as it is sent to vLLM.

    The `id` and the `folder`, in PEFT's format, whose path is also its name for vLLM, are used
    once. An adapter that is not `finite` is not written.
    """

    version: int
    id: int
    folder: Path
    finite: bool


@final
class PublishedAdapters:
    """Writes an adapter when it is first needed, and removes its old versions."""

    def __init__(self, slots: AdapterSlots, folder: Path) -> None:
        self._slots = slots
        self._folder = folder
        self._current: dict[str, Published] = {}
        self._removed: list[int] = []

    def current(self, name: str) -> Published:
        """Return the current version of an adapter; write it if it is new."""
        version = self._slots.versions[name]
        published = self._current.get(name)
        if published is None or published.version != version:
            self._drop(name)
            published = self._current[name] = self._write(name, version)
        return published

    def removed(self) -> list[int]:
        """Return the ids that vLLM can drop, including those of removed slots; each id once."""
        for name in self._current.keys() - set(self._slots.names):
            self._drop(name)
        removed, self._removed = self._removed, []
        return removed

    def forget(self) -> None:
        """Drop all versions, so that adapters are written again for a newly started vLLM."""
        for name in list(self._current):
            self._drop(name)
        self._removed.clear()

    def _drop(self, name: str) -> None:
        published = self._current.pop(name, None)
        if published is not None and published.finite:
            self._removed.append(published.id)
            shutil.rmtree(published.folder, ignore_errors=True)

    def _write(self, name: str, version: int) -> Published:
        number = next(_IDS)
        folder = self._folder / f"{name}-{version}-{number}"
        state = folded(self._slots, name)
        finite = all(bool(value.isfinite().all()) for value in state.values())
        if finite:
            folder.mkdir(parents=True)
            write_tensors(state, folder / WEIGHTS, {"format": "pt"})
            (folder / CONFIG).write_text(json.dumps(_config(self._slots, name), sort_keys=True))
        return Published(version, number, folder, finite)


def rank_of(slots: AdapterSlots, name: str) -> int:
    """Return the largest rank of an adapter's layers."""
    shapes = slots.shapes(name).items()
    return max(shape[0] for key, shape in shapes if key.endswith(".lora_A.weight"))


def folded(slots: AdapterSlots, name: str) -> dict[str, Tensor]:
    """Return an adapter's weights by PEFT's keys, with one rank and a scale of 1 in all layers.

    B includes the scale of its layer, and smaller ranks are padded with zeros, for a vLLM without
    per-layer ranks and scales.
    """
    rank = rank_of(slots, name)
    state = slots.state(name)
    for key, layer in slots.layers.items():
        first, second = (f"{key}.lora_{part}.weight" for part in "AB")
        if first in state:
            missing = rank - state[first].shape[0]
            state[first] = torch.nn.functional.pad(state[first], (0, 0, 0, missing))
            scaled = state[second] * layer.scaling[name]
            state[second] = torch.nn.functional.pad(scaled, (0, missing))
    return state


def _config(slots: AdapterSlots, name: str) -> dict[str, object]:
    """Return the contents of adapter_config.json for a folded adapter."""
    rank = rank_of(slots, name)
    modules = {key.split(".")[-3] for key in slots.shapes(name)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": slots.base.name,
        "inference_mode": True,
        "bias": "none",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
    }
