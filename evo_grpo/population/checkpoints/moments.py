"""Reads and copies AdamW's moments, stored in optimizer.safetensors by the adapter's names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from evo_grpo.errors import CheckpointError
from evo_grpo.model.forward.sending import fetch
from evo_grpo.model.lora.load import AdapterPlan, padded

OPTIMIZER = "optimizer.safetensors"
#: AdamW's state of a parameter.
_MOMENTS = {"exp_avg", "exp_avg_sq", "step"}
_AFRESH = "load it without load_optimizer to start AdamW afresh"


def copy_moments(optimizer: torch.optim.Optimizer, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Copy AdamW's moments of one slot to the CPU, by file key.

    `names` are PEFT's file keys of the slot's parameters, in their order.
    """
    named = list(names)
    state = optimizer.state_dict()["state"]
    moments = {
        f"{named[index]}.{name}": value
        for index, values in state.items()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    return dict(zip(moments, fetch(list(moments.values())), strict=True))


def read_moments(folder: Path, plan: AdapterPlan) -> dict[int, dict[str, torch.Tensor]]:
    """Read AdamW's moments by parameter position in a planned slot.

    Moments are padded to the shapes of their parameters. A parameter that the checkpoint's
    configuration does not have gets no moments.
    """
    file = folder / OPTIMIZER
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise CheckpointError(
            f"checkpoint {file}: not a whole safetensors file: {error}"
        ) from error
    order = {name: place for place, name in enumerate(plan.shapes)}
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        parameter, _, name = key.rpartition(".")
        shape = plan.own.get(parameter) if name in _MOMENTS else None
        fits = shape is not None and value.shape == (() if name == "step" else shape)
        if not fits or not value.is_floating_point() or value.dtype.itemsize < 2:
            raise CheckpointError(
                f"checkpoint {file}: {key} of shape {tuple(value.shape)} and {value.dtype} does "
                f"not fit this agent's adapter; {_AFRESH}"
            )
        wide = value if name == "step" else value.new_zeros(plan.shapes[parameter])
        moments.setdefault(order[parameter], {})[name] = padded(value, wide)
    for place, found in moments.items():
        if missing := _MOMENTS - found.keys():
            raise CheckpointError(
                f"checkpoint {file}: {list(order)[place]} has no {', '.join(sorted(missing))}; "
                f"{_AFRESH}"
            )
    return moments
