"""The mean of the products s B A of adapters, which may differ in rank, alpha and layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from evo_grpo.model.lora.load import copy_slot, fit_slot
from evo_grpo.model.lora.resize import cut, layer_keys, layer_of, layer_scales
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.model.lora.target_sets import with_targets


def mix_products(slots: AdapterSlots, sources: Sequence[str], target: str) -> None:
    """Write the mean of the products s B A of two or more slots to another slot.

    That of the means of A and of B (`mix_slots`) depends on how the products are factored. The
    target gets the configuration of the source with the largest rank, and the modules of all. The
    mean, whose rank is the sum of all, is cut to that rank. A source without a module adds zero
    there. The decompositions run on the CPU in float64.
    """
    widest = max(sources, key=lambda name: slots.lora_config(name).r)
    states = [slots.state(name) for name in sources]
    scales = [layer_scales(slots, name) for name in sources]
    modules = set().union(*map(slots.modules, sources))
    if modules == slots.modules(widest):
        copy_slot(slots, widest, target)
    else:
        fit_slot(slots, target, with_targets(slots.lora_config(widest), modules))
    own, scale = slots.state(target), layer_scales(slots, target)
    mean: dict[str, Tensor] = {}
    for first, second in layer_keys(own):
        layer, like, nothing = layer_of(first), own[first], torch.zeros_like(own[second])
        downs = [state.get(first, like) for state in states]
        ups = [
            state.get(second, nothing) * (by.get(layer, 1.0) / len(sources))
            for state, by in zip(states, scales, strict=True)
        ]
        a, b, _ = cut(torch.cat(downs), torch.cat(ups, dim=1), like)
        a, b = _paced(a, b, like)
        mean[first], mean[second] = a, (b / scale[layer]).to(own[second].dtype)
    slots.put(target, mean, Path(target))


def _paced(a: Tensor, b: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return A about as large as another one, and B in inverse proportion; the product stays.

    A step of AdamW has a size of its own, so an A that shrinks, as when a decomposition divides the
    singular values evenly, changes how fast the product learns. The factor is a power of two, which
    rounds nothing.
    """
    size, wanted = float(a.norm()), float(like.norm())
    if not (size > 0 and wanted > 0 and math.isfinite(size / wanted)):
        return a, b
    factor = 2.0 ** round(math.log2(wanted / size))
    return a * factor, b / factor
