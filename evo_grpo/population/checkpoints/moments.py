"""optimizer.safetensors: AdamW's moments, by the names of the adapter's tensors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from evo_grpo.errors import CheckpointError
from evo_grpo.model.lora.load import AdapterPlan, padded

OPTIMIZER = "optimizer.safetensors"
#: What AdamW keeps of a parameter.
_MOMENTS = {"exp_avg", "exp_avg_sq", "step"}
_AFRESH = "load it without load_optimizer to start AdamW afresh"


def copy_moments(optimizer: torch.optim.Optimizer, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the moments of AdamW over one slot by file key, copied to the CPU.

    `names` are the slot's parameters by PEFT's file keys, in their order.
    """
    named = list(names)
    state = optimizer.state_dict()["state"]
    return {
        f"{named[index]}.{name}": value.detach().to("cpu", copy=True).contiguous()
        for index, values in state.items()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def read_moments(folder: Path, plan: AdapterPlan) -> dict[int, dict[str, torch.Tensor]]:
    """Read AdamW's moments by parameter position in a planned slot.

    They are padded as their parameters are. A parameter that the checkpoint's configuration does
    not have gets none.

    Raises:
        CheckpointError: The file is damaged, incomplete, or not of this adapter's parameters.
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
        if not fits or not value.is_floating_point():
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
