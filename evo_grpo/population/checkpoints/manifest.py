"""Reads and writes the attributes.json and AdamW's moments of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file

from evo_grpo.errors import CheckpointError, RunDirError
from evo_grpo.model.forward.sending import fetch
from evo_grpo.model.lora.files import CONFIG, WEIGHTS
from evo_grpo.model.lora.load import AdapterPlan, padded
from evo_grpo.record.names import ATTRIBUTES
from evo_grpo.record.plain import MAX_JSON_BYTES, check_relative, refuse_links
from evo_grpo.record.records import score_from_json
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.problems import validated
from evo_grpo.schema.validation import short_integer
from evo_grpo.types import Score

OPTIMIZER = "optimizer.safetensors"
#: AdamW's state of a parameter, in the order in which all ranks exchange it.
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def copy_moments(optimizer: torch.optim.Optimizer, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Copy AdamW's moments of one slot to the CPU, by PEFT's file keys in `names`."""
    keys = list(names)
    state = optimizer.state_dict()["state"]
    moments = {
        f"{keys[index]}.{name}": value
        for index, values in state.items()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    return dict(zip(moments, fetch(list(moments.values())), strict=True))


def read_moments(folder: Path, plan: AdapterPlan) -> dict[int, dict[str, torch.Tensor]]:
    """Read AdamW's moments by parameter position in a planned slot, padded to its shapes.

    A parameter that the checkpoint's configuration does not have gets no moments.
    """
    file = folder / OPTIMIZER
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise CheckpointError(
            f"checkpoint {file}: not a whole safetensors file: {error}"
        ) from error
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for place, (parameter, shape) in enumerate(plan.shapes.items()):
        keys = {name: f"{parameter}.{name}" for name in _MOMENTS}
        values = {name: tensors[key] for name, key in keys.items() if key in tensors}
        if len(values) == len(_MOMENTS) and _fit(values, plan.read_shapes.get(parameter)):
            for key in keys.values():
                del tensors[key]
            wide = {n: v if n == "step" else v.new_zeros(shape) for n, v in values.items()}
            moments[place] = {name: padded(value, wide[name]) for name, value in values.items()}
    if tensors:
        key, value = min(tensors.items(), key=lambda item: item[0])
        raise CheckpointError(
            f"checkpoint {file}: {key} of shape {tuple(value.shape)} and {value.dtype} does not "
            "fit this agent's adapter, or stands alone; load it without load_optimizer to start "
            "AdamW afresh"
        )
    return moments


def _fit(moments: Mapping[str, torch.Tensor], shape: tuple[int, ...] | None) -> bool:
    """Return whether the moments of a parameter are floats of its shape."""
    return all(
        value.shape == (() if name == "step" else shape)
        and value.is_floating_point()
        and value.dtype.itemsize >= 2
        for name, value in moments.items()
    )


FORMAT = 3
"""Version of attributes.json."""
_OWN = (ATTRIBUTES, OPTIMIZER, CONFIG, WEIGHTS, "actor", "reference", "base")
"""All entries of a checkpoint or a PEFT folder that are ever read."""


@dataclass(frozen=True)
class _Attributes:
    """The content of attributes.json.

    `files` has the SHA-256 of every other file except those of a saved base, by path in the folder.
    `reference` is "own", "start" (the adapter that the agents started from) or "base".
    """

    format: int
    settings: dict[str, Any]
    base: str
    base_digest: str
    dtype: str
    vocabulary: int
    hparams: dict[str, Any]
    member: dict[str, Any]
    history: list[dict[str, Any]]
    steps: int
    reference_updates: int
    has_optimizer: bool
    lora_only: bool
    objects: list[str]
    padding: tuple[int, str | None] | None
    files: dict[Annotated[str, AfterValidator(check_relative)], str]
    reference: str
    dead_steps: int = 0
    calls: int = 0


_SCHEMA = TypeAdapter(_Attributes)


def refuse_foreign_files(folder: Path) -> None:
    """Raise an error for a link, pipe or device in a folder, which may itself be a link."""
    try:
        for name in _OWN:
            refuse_links(folder / name, MAX_JSON_BYTES)
    except RunDirError as error:
        raise CheckpointError(f"checkpoint {error}") from error


def peft_folder(folder: Path) -> Path | None:
    """Return the folder of a plain PEFT adapter: `folder` or its actor/; None for a checkpoint.

    A folder with other parts of a checkpoint counts as a checkpoint without its attributes.
    """
    refuse_foreign_files(folder)
    parts = (ATTRIBUTES, "attributes.pt", OPTIMIZER)
    if any((folder / part).exists() for part in parts):
        return None
    places = (folder, folder / "actor")
    return next((place for place in places if (place / CONFIG).is_file()), None)


def read_attributes(folder: Path) -> dict[str, Any]:
    """Read attributes.json."""
    refuse_foreign_files(folder)
    file = folder / ATTRIBUTES
    if not file.is_file():
        raise CheckpointError(f"checkpoint {folder}: {ATTRIBUTES} is missing{_remedy(folder)}")
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"), parse_int=short_integer)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {file}: not JSON, it may be truncated: {error}"
        ) from error
    version = data.get("format") if isinstance(data, dict) else FORMAT
    if version != FORMAT:
        raise CheckpointError(
            f"checkpoint {file}: expected format {FORMAT}, got {version!r}: another version of "
            "evo-grpo wrote it; load it with that version, or take the weights alone: "
            f"load_checkpoint({str(folder / 'actor')!r})"
        )
    try:
        validated(_SCHEMA, data)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {file}: {error}; put the file back as it was") from error
    return data


def read_state(attributes: Mapping[str, Any], folder: Path) -> tuple[Hparams, list[Score]]:
    """Return hyperparameters and history of attributes.json."""
    try:
        history = [score_from_json(score) for score in attributes["history"]]
        return Hparams(**attributes["hparams"]), history
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {folder / ATTRIBUTES}: hparams or history are not what "
            f"save_checkpoint writes: {error}"
        ) from error


def _remedy(folder: Path) -> str:
    weights = f"load_checkpoint({str(folder / 'actor')!r}) takes the weights alone"
    if peft_folder(folder) is not None:
        return (
            ": it is a PEFT folder, which names no agent; build one with GRPO(model=..., "
            f"lora=...) and call load_checkpoint({str(folder)!r})"
        )
    if (folder / "actor" / CONFIG).is_file():
        return f"; put it back, or {weights}"
    return "; expected a folder written by save_checkpoint, or a PEFT folder: no pickle is loaded"
