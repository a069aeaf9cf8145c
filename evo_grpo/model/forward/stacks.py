"""The stacked adapters of a layer, so that one batched matmul serves all agents."""

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


def build_stack(
    layer: LoraLayer, adapters: Sequence[str | None], dtype: torch.dtype | None
) -> Stack:
    """Stack adapters of one layer; differentiable, so that each adapter gets its gradient.

    At least one adapter is not None; None becomes zeros, for the base without an adapter. Smaller
    ranks are padded with zeros to the largest. With dtype None, the adapters keep their dtype.
    """
    known = layer.lora_A
    # A slot may lack a module that another slot adapts: it adds nothing there.
    pairs = [
        None if name is None or name not in known else adapter_weights(layer, name)
        for name in adapters
    ]
    present = [pair for pair in pairs if pair is not None]
    rank = max(a.shape[0] for a, _ in present)
    dtype = dtype or present[0][0].dtype
    scales = [
        0.0 if pair is None else float(layer.scaling[str(name)])
        for name, pair in zip(adapters, pairs, strict=True)
    ]
    if len(present) == len(pairs) and all(a.shape[0] == rank for a, _ in present):
        return _alike(present, scales, dtype)
    template_a, template_b = present[0]
    a_parts: list[Tensor] = []
    b_parts: list[Tensor] = []
    for pair, scale in zip(pairs, scales, strict=True):
        if pair is None:
            a_parts.append(template_a.new_zeros(rank, template_a.shape[1]))
            b_parts.append(template_b.new_zeros(rank, template_b.shape[0]))
            continue
        a, b = pair[0], pair[1].T
        missing = rank - a.shape[0]
        if missing:
            a = nn.functional.pad(a, (0, 0, 0, missing))
            b = nn.functional.pad(b, (0, 0, 0, missing))
        a_parts.append(a)
        b_parts.append(b * scale)
    return Stack(torch.stack(a_parts).to(dtype), torch.stack(b_parts).to(dtype))


def _alike(
    pairs: Sequence[tuple[Tensor, Tensor]], scales: Sequence[float], dtype: torch.dtype
) -> Stack:
    """Stack adapters of equal rank: two stacks and one product for any number of adapters."""
    if len(pairs) == 1:
        # One adapter needs no copy: unsqueeze keeps the floor (N = 1) free of stacking.
        a, b = pairs[0][0].unsqueeze(0), pairs[0][1].unsqueeze(0)
    else:
        a, b = torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])
    same = len(set(scales)) == 1
    b = b * (scales[0] if same else b.new_tensor(scales)[:, None, None])
    return Stack(a.to(dtype), b.to(dtype).transpose(1, 2))


def adapter_weights(layer: LoraLayer, name: str) -> tuple[Tensor, Tensor]:
    """Return the weights A (R, in) and B (out, R) of an adapter of a LoRA layer."""
    return (
        cast("Tensor", layer.lora_A[name].weight),
        cast("Tensor", layer.lora_B[name].weight),
    )
