"""One layer's adapters side by side, so that one batched matmul serves all agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn


@dataclass
class Stack:
    """The stacked adapters of one layer, in the compute dtype.

    Attributes:
        a: (N, R, in).
        b: (N, R, out), which carries the scaling.
    """

    a: Tensor
    b: Tensor

    def select(self, agents: Tensor) -> Stack:
        """Return the stack of the agents at these positions (M,), on any device."""
        rows = agents.to(self.a.device)
        return Stack(self.a.index_select(0, rows), self.b.index_select(0, rows))


def build_stack(layer: LoraLayer, adapters: Sequence[str | None], dtype: torch.dtype) -> Stack:
    """Stack adapters of one layer; differentiable, so that each keeps a gradient of its own.

    Args:
        layer: A LoRA layer over a linear one.
        adapters: N adapter names, not all None; None stacks zeros: the base alone.
        dtype: The compute dtype.

    Returns:
        The stack; smaller ranks are padded with zeros to the largest.
    """
    # A slot may lack a module that another slot adapts: it adds nothing there.
    named = [name for name in adapters if name is not None and name in layer.lora_A]
    rank = max(_weights(layer, name)[0].shape[0] for name in named)
    template_a, template_b = _weights(layer, named[0])
    a_parts: list[Tensor] = []
    b_parts: list[Tensor] = []
    for name in adapters:
        if name is None or name not in layer.lora_A:
            a_parts.append(template_a.new_zeros(rank, template_a.shape[1]))
            b_parts.append(template_b.new_zeros(rank, template_b.shape[0]))
            continue
        a, b = _weights(layer, name)
        b = b.T
        missing = rank - a.shape[0]
        if missing:
            a = nn.functional.pad(a, (0, 0, 0, missing))
            b = nn.functional.pad(b, (0, 0, 0, missing))
        a_parts.append(a)
        b_parts.append(b * layer.scaling[name])
    # One adapter needs no copy: unsqueeze keeps the floor (N = 1) free of stacking.
    if len(a_parts) == 1:
        return Stack(a_parts[0].to(dtype).unsqueeze(0), b_parts[0].to(dtype).unsqueeze(0))
    return Stack(torch.stack(a_parts).to(dtype), torch.stack(b_parts).to(dtype))


def _weights(layer: LoraLayer, name: str) -> tuple[Tensor, Tensor]:
    """Return A (R, in) and B (out, R), which PEFT types as any attribute of any module."""
    return (
        cast("Tensor", layer.lora_A[name].weight),
        cast("Tensor", layer.lora_B[name].weight),
    )
