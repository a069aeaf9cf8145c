"""optimizer.safetensors: AdamW's moments, by the position of their parameter."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from evo_grpo.errors import CheckpointError

OPTIMIZER = "optimizer.safetensors"
#: What AdamW keeps of a parameter.
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def copy_moments(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return an optimizer's moments by file key, copied to the CPU."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": value.detach().to("cpu", copy=True).contiguous()
        for index, values in state.items()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def write_moments(moments: Mapping[str, torch.Tensor], folder: Path) -> str | None:
    """Write the file; without moments, remove that of an earlier checkpoint.

    Returns:
        The SHA-256 of the file, None where there is none.
    """
    file = folder / OPTIMIZER
    if not moments:
        file.unlink(missing_ok=True)
        return None
    data = save(dict(moments))
    file.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def read_moments(folder: Path, shapes: Sequence[torch.Size]) -> dict[int, dict[str, torch.Tensor]]:
    """Read AdamW's moments by parameter position; none where the file is not there.

    Raises:
        CheckpointError: When it is damaged, or is not of parameters of these shapes.
    """
    file = folder / OPTIMIZER
    if not file.is_file():
        return {}
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise CheckpointError(
            f"checkpoint {file}: not a whole safetensors file: {error}"
        ) from error
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        place, _, name = key.partition(".")
        fits = place.isdecimal() and int(place) < len(shapes) and name in _MOMENTS
        if not fits or value.shape != (() if name == "step" else shapes[int(place)]):
            raise CheckpointError(
                f"checkpoint {file}: {key} of shape {tuple(value.shape)} does not fit this agent's "
                "adapter; load it without load_optimizer to start AdamW afresh"
            )
        if not value.is_floating_point():
            raise CheckpointError(
                f"checkpoint {file}: {key} has dtype {value.dtype}, expected floating-point "
                "numbers; load it without load_optimizer to start AdamW afresh"
            )
        moments.setdefault(int(place), {})[name] = value
    for place, found in moments.items():
        if len(found) < len(_MOMENTS):
            raise CheckpointError(
                f"checkpoint {file}: expected {', '.join(_MOMENTS)} of parameter {place}, got "
                f"{', '.join(sorted(found))}; load it without load_optimizer to start AdamW afresh"
            )
    return moments
