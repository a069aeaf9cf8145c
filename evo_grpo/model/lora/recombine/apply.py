"""Applies an operator to the slots of adapters, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evo_grpo.model.lora.load import copy_slot, fit_slot
from evo_grpo.model.lora.recombine.product import Product
from evo_grpo.model.lora.resize import cut, grown, layer_keys, layer_of, layer_scales
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.model.lora.target_sets import with_targets

if TYPE_CHECKING:
    import numpy as np

    from evo_grpo.model.lora.recombine.protocol import Operator


def recombine_slots(
    slots: AdapterSlots,
    sources: Sequence[str],
    target: str,
    operator: Operator,
    rng: np.random.Generator,
) -> None:
    """Write what an operator makes of the products s B A of some slots to a slot.

    The target may be one of the sources. It gets the configuration of the source with the largest
    rank, and the modules of all; a result with a larger rank is cut to it. A source without a
    module adds zero there. The decompositions run on the CPU in float64.

    Args:
        slots: The slots.
        sources: The parents, the better one first.
        target: The child.
        operator: The operator.
        rng: Stream of its draws.
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
    child: dict[str, Tensor] = {}
    for first, second in layer_keys(own):
        layer = layer_of(first)
        nothing = Product(own[first], torch.zeros_like(own[second]))
        parents = [
            Product(state[first], state[second], by[layer]) if first in state else nothing
            for state, by in zip(states, scales, strict=True)
        ]
        made = operator(parents, len(own[first]), rng)
        a, b = _fitted(made, own[first])
        if not any(made.a is parent.a for parent in parents):
            a, b = _paced(a, b, own[first])
        child[first] = a
        child[second] = (b / (scale[layer] / made.scale)).to(own[second].dtype)
    slots.put(target, child, Path(target))


def _fitted(made: Product, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and B of a product with as many ranks as another A (R, in)."""
    if len(made.a) > len(like):
        a, b, _ = cut(made.a, made.b, like)
        return a, b
    return grown(made.a.to(like.dtype), made.b, like)


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
