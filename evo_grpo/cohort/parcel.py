"""An agent on its way to another rank: its tensors by name, on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from evo_grpo.cohort.state import AgentState
from evo_grpo.model.lora.slots import AdapterSlots

_ACTOR, _REFERENCE, _MOMENTS = "actor/", "reference/", "moments/"


def packed(slots: AdapterSlots, state: AgentState, *, moments: bool) -> dict[str, Tensor]:
    """Return an agent's tensors: 4 bytes per parameter, 12 with moments, 16 with a reference too.

    Args:
        slots: Where its weights are.
        state: The agent.
        moments: Whether AdamW's moments come along.
    """
    tensors = {_ACTOR + key: value for key, value in slots.state(state.adapter).items()}
    if state.has_reference:
        reference = slots.state(state.reference)
        tensors |= {_REFERENCE + key: value for key, value in reference.items()}
    if moments:
        for place, values in state.optimizer.state_dict()["state"].items():
            tensors |= {
                f"{_MOMENTS}{place}/{name}": value.detach().to("cpu", copy=True).contiguous()
                for name, value in values.items()
            }
    return tensors


def unpack(slots: AdapterSlots, state: AgentState, tensors: dict[str, Tensor]) -> None:
    """Give a slot and its fresh optimizer the tensors that `packed` made of another.

    Args:
        slots: Where the weights go.
        state: The agent, whose slots are there.
        tensors: Those of an agent of the same settings.
    """
    origin = Path(state.adapter)
    slots.put(state.adapter, _below(tensors, _ACTOR), origin)
    if state.has_reference:
        slots.put(state.reference, _below(tensors, _REFERENCE), origin)
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in _below(tensors, _MOMENTS).items():
        place, _, what = name.partition("/")
        moments.setdefault(int(place), {})[what] = value
    if moments:
        groups = state.optimizer.state_dict()["param_groups"]
        with torch.no_grad():
            state.optimizer.load_state_dict({"state": moments, "param_groups": groups})


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
