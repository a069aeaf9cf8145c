"""optimizer.safetensors: AdamW's moments, by the names of the adapter's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from evo_grpo.errors import CheckpointError
from evo_grpo.model.lora.files import serialise
from evo_grpo.model.lora.load import AdapterPlan, padded

OPTIMIZER = "optimizer.safetensors"
#: What AdamW keeps of a parameter.
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_AFRESH = "load it without load_optimizer to start AdamW afresh"


def copy_moments(optimizer: torch.optim.Optimizer, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return an optimizer's moments by file key, copied to the CPU.

    Args:
        optimizer: AdamW over one slot.
        names: The slot's parameters by PEFT's file keys, in their order.
    """
    named = list(names)
    state = optimizer.state_dict()["state"]
    return {
        f"{named[index]}.{name}": value.detach().to("cpu", copy=True).contiguous()
        for index, values in state.items()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def count_moments(moments: Iterable[str]) -> int:
    """Return how many parameters these file keys are of."""
    return len({key.rpartition(".")[0] for key in moments})


def serialise_moments(moments: Mapping[str, torch.Tensor]) -> bytes | None:
    """Return the contents of optimizer.safetensors, None without moments."""
    return serialise(moments) if moments else None


def read_moments(
    folder: Path, plan: AdapterPlan, count: int | None
) -> dict[int, dict[str, torch.Tensor]]:
    """Read AdamW's moments by parameter position in a planned slot; none where there is no file.

    They are padded as their parameters are. A parameter that the checkpoint's configuration does
    not have gets none.

    Args:
        folder: The checkpoint.
        plan: Where its actor goes.
        count: Parameters that should have moments; None for all of the actor's own.

    Raises:
        CheckpointError: When it is damaged, incomplete, or is not of this adapter's parameters.
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
    order = {name: place for place, name in enumerate(plan.shapes)}
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        parameter, _, name = key.rpartition(".")
        shape = plan.own.get(parameter) if name in _MOMENTS else None
        if shape is None or value.shape != (() if name == "step" else shape):
            raise CheckpointError(
                f"checkpoint {file}: {key} of shape {tuple(value.shape)} does not fit this agent's "
                f"adapter; {_AFRESH}"
            )
        if not value.is_floating_point():
            raise CheckpointError(
                f"checkpoint {file}: {key} has dtype {value.dtype}, expected floating-point "
                f"numbers; {_AFRESH}"
            )
        wide = value if name == "step" else value.new_zeros(plan.shapes[parameter])
        moments.setdefault(parameter, {})[name] = padded(value, wide)
    _check_complete(moments, plan, count, file)
    return {order[name]: found for name, found in moments.items()}


def _check_complete(
    moments: Mapping[str, Mapping[str, torch.Tensor]],
    plan: AdapterPlan,
    count: int | None,
    file: Path,
) -> None:
    for name, found in moments.items():
        if len(found) < len(_MOMENTS):
            raise CheckpointError(
                f"checkpoint {file}: expected {', '.join(_MOMENTS)} of parameter {name}, got "
                f"{', '.join(sorted(found))}; {_AFRESH}"
            )
    without = [name for name in plan.own if name not in moments]
    expected = len(plan.own) if count is None else count
    if len(moments) < expected:
        raise CheckpointError(
            f"checkpoint {file}: expected the moments of {expected} parameters, got those of "
            f"{len(moments)}; there are none of {without[0]}; put the file back, or {_AFRESH}"
        )
