"""LoRA dropout in a batch of many agents: each row has its own masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from evo_grpo.model.forward.layout import RowLayout
from evo_grpo.seeding import derive


@dataclass(frozen=True)
class Dropout:
    """LoRA dropout of a learn pass: one stream per row.

    A row's mask depends on its own stream and the layer alone: not on the other rows, on how far
    they are padded, or on the micro-batch it came in. A recomputed forward draws it again.

    Attributes:
        rows: One seed per row of the batch, in row order.
    """

    rows: tuple[int, ...]

    @classmethod
    def of(cls, seed: int, layout: RowLayout) -> Dropout:
        """Return streams keyed by (seed, adapter, position among the adapter's rows)."""
        return cls(
            tuple(
                derive(seed, str(name), row)
                for name, count in zip(layout.adapters, layout.counts, strict=True)
                for row in range(count)
            )
        )


def apply_dropout(
    x: Tensor, dropout: Dropout, name: str, layer: LoraLayer, layout: RowLayout
) -> Tensor:
    """Apply each adapter's own dropout rate to its rows.

    Args:
        x: (B, ..., in) inputs of a LoRA layer.
        dropout: One stream per row.
        name: The layer's name, part of every stream.
        layer: The layer.
        layout: Rows per adapter.

    Returns:
        (B, ..., in), scaled by 1 / (1 - rate) where kept.
    """
    parts: list[Tensor] = []
    split = x.split(layout.counts)
    for adapter, rows, mine in zip(layout.adapters, layout.slices(), split, strict=True):
        known = adapter is not None and adapter in layer.lora_dropout
        module = layer.lora_dropout[str(adapter)] if known else None
        rate = module.p if isinstance(module, nn.Dropout) else 0.0
        if rate == 0.0 or rows.start == rows.stop:
            parts.append(mine)
            continue
        # Uniform draws fill a row token by token, so a longer padding only appends to them.
        own = range(rows.start, rows.stop)
        drawn = torch.stack([_uniform(x[row].detach(), dropout.rows[row], name) for row in own])
        parts.append(mine * (drawn >= rate).to(x.dtype) / (1 - rate))
    return torch.cat(parts)


def _uniform(like: Tensor, seed: int, name: str) -> Tensor:
    # Drawn on the CPU: a device's generator may order its draws by the size of the tensor.
    generator = torch.Generator().manual_seed(derive(seed, name))
    return torch.rand(like.shape, generator=generator).to(like.device)
