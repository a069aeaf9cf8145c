"""The comparison of learning by kernels with torch's operations, before the first step on a device.

Compilers and drivers differ from card to card, torch's flash attention is private, so that a
release may change what it means, and wrong gradients would show in no error.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from evo_grpo.model.forward.layout import RowLayout
from evo_grpo.model.forward.prefix import find_shared_prefixes
from evo_grpo.model.llama.cuda.learn import KernelForward
from evo_grpo.model.llama.train import LlamaForward
from evo_grpo.model.llama.weights import layers_of
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.model.probing import own_generator, probe_ids

#: Largest difference over the size of a gradient, and that of each layer. In bf16, roundings of two
#: ways give a third of the sum or less; a kernel that leaves out its part twice of it or more.
_MOST, _MOST_OF_A_LAYER = 0.1, 0.01
#: Smaller gradients, as a share of the largest, are mostly rounding.
_LEAST = 0.01
#: Standard deviation of what is added to adapters, so that no B is zero.
_NOISE = 0.02
#: Tokens of a row, and of its prompt, which is longer than the tiles of kernels.
_COLUMNS, _PROMPT = 180, 150


def differs(slots: AdapterSlots, adapters: Sequence[str | None]) -> str | None:
    """Return by how much gradients differ, None if no more than roundings explain.

    It is found once for a base on a device, by the first adapters.
    """
    base = slots.base
    names = [name for name in adapters if name is not None][:2]
    known: dict[object, float] = base.derived.setdefault("kernels compared", {})
    key = base.device, base.dtype
    if names and key not in known:
        known[key] = apart(slots, names)
    found, layers = known.get(key, 0.0), len(layers_of(base))
    if found <= _MOST + _MOST_OF_A_LAYER * layers:
        return None
    return f"gradients differ by {found:.0%} from those of torch's operations"


def apart(slots: AdapterSlots, names: Sequence[str]) -> float:
    """Return the largest relative difference of a gradient of two adapters."""
    parameters = [p for name in names for p in slots.parameters(name)]
    before = [(p.detach().clone(), p.grad) for p in parameters]
    try:
        with (
            own_generator(slots.base.device),
            torch.autocast(slots.base.device.type, enabled=False),
        ):
            generator = torch.Generator().manual_seed(0)
            for p in parameters:
                noise = torch.randn(p.shape, generator=generator, device="cpu") * _NOISE
                p.add_(noise.to(p))
            ways = [_gradients(kind, slots, names) for kind in (KernelForward, LlamaForward)]
    finally:
        for p, (value, grad) in zip(parameters, before, strict=True):
            p.data.copy_(value)
            p.grad = grad
    sizes = torch.stack([theirs.norm() for theirs in ways[1]])
    errors = torch.stack([(a - b).norm() for a, b in zip(*ways, strict=True)])
    found = (errors / sizes.clamp(min=_LEAST * float(sizes.max()))).max()
    return float(found.nan_to_num(float("inf")))


def _gradients(kind: type[LlamaForward], slots: AdapterSlots, names: Sequence[str]) -> list[Tensor]:
    """Return the gradients fp32 of two rows of each adapter that share a prompt."""
    base, rows = slots.base, 2 * len(names)
    ids = probe_ids(base.vocabulary, rows, min(_COLUMNS, base.context_length or _COLUMNS)).numpy()
    prompt = min(_PROMPT, ids.shape[1] // 2)
    ids[1::2, :prompt] = ids[::2, :prompt]
    masks = np.zeros(ids.shape, bool)
    masks[:, prompt:] = True
    lines, places = np.nonzero(masks)
    where = torch.as_tensor(lines * ids.shape[1] + places - 1, device=base.device)
    prefix = find_shared_prefixes(np.arange(rows) // 2, ids, masks, base.device)
    step = kind(slots, names)
    with torch.enable_grad(), step.rows(RowLayout(tuple(names), (2,) * len(names))):
        hidden = step.hidden_at(torch.as_tensor(ids, device=base.device), where, prefix)
        # A direction of each state that the last norm, which scales it, does not cancel.
        signs = torch.arange(hidden.shape[1], device=base.device) % 3 - 1
        base.backward((hidden.float() * signs).sum())
    step.collect_gradients()
    owned = [p for name in names for p in slots.parameters(name)]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in owned]
    for p in owned:
        p.grad = None
    return [grad.float() for grad in grads]
