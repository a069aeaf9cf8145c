"""Fixed frequencies for rotary embeddings that depend on the longest row of a batch.

With `longrope` (Phi-3, Phi-4-mini) and `dynamic` NTK scaling, transformers chooses a batch's
frequencies by its largest position, including padding. A long row of one agent would change the
log-probs of another, and a completion that grows beyond the switch would be sampled and trained
with different frequencies. So they are chosen once: those for rows up to the switch, or, if rows
may be longer, the long ones for all rows, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

#: Attribute of a rotary embedding that stores its type while the frequencies are fixed.
_KEPT = "evo_grpo_rope_type"
#: A type without an update of frequencies.
_STILL = "default"


def switch_length(trunk: nn.Module) -> int | None:
    """Return the length of rows up to which the frequencies are constant; None without a limit."""
    found = [
        _switch(module, layer_type, rope_type)
        for module in _rotary(trunk)
        for layer_type, rope_type in _types(module).items()
        if _moves(rope_type)
    ]
    return min(found, default=None)


@torch.no_grad()
def hold_frequencies(trunk: nn.Module, longest: int) -> None:
    """Fix the frequencies at those for rows of `longest` tokens."""
    for module in _rotary(trunk):
        types = _types(module)
        if not any(_moves(rope_type) for rope_type in types.values()):
            continue
        vars(module).setdefault(_KEPT, module.rope_type)
        module.rope_type = vars(module)[_KEPT]
        like = module.get_buffer(next(name for name, _ in module.named_buffers()))
        for layer_type, rope_type in types.items():
            if _moves(rope_type):
                arguments = {} if layer_type is None else {"layer_type": layer_type}
                # Run a short row first: only a short row resets the frequencies of a longer one.
                for last in (0, longest - 1):
                    positions = torch.tensor([[last]], device=like.device)
                    module(like.view(1, 1, -1), position_ids=positions, **arguments)
        still = {name: _STILL if _moves(kind) else kind for name, kind in types.items()}
        module.rope_type = still if isinstance(vars(module)[_KEPT], dict) else _STILL


def keep_frequencies(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores the present frequencies of rotary embeddings."""
    kept = [
        (module, dict(vars(module)), {name: b.clone() for name, b in _buffers(module)})
        for module in _rotary(model)
    ]

    def give_back() -> None:
        for module, attributes, buffers in kept:
            device = next((b.device for _, b in _buffers(module)), None)
            for name in {name for name, _ in _buffers(module)} - set(buffers):
                delattr(module, name)  # an attribute of older releases of transformers
            vars(module).clear()
            vars(module).update(attributes)
            for name, value in buffers.items():
                # Not in place: in older releases two buffers may share one tensor.
                setattr(module, name, value.to(device))

    return give_back


def _rotary(trunk: nn.Module) -> Iterator[Any]:
    return (m for m in trunk.modules() if isinstance(getattr(m, "rope_type", None), str | dict))


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return module.named_buffers(recurse=False, remove_duplicate=False)


def _types(module: Any) -> dict[str | None, str]:  # noqa: ANN401 -- a rotary embedding of any model
    """Return the types by layer type, None if all layers have one."""
    kept = vars(module).get(_KEPT, module.rope_type)
    return dict(kept) if isinstance(kept, dict) else {None: kept}


def _moves(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


def _switch(module: Any, layer_type: str | None, rope_type: str) -> int:  # noqa: ANN401 -- as above
    parameters = module.config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    longrope = rope_type == "longrope"
    own = parameters.get("original_max_position_embeddings") if longrope else None
    return int(own or module.original_max_seq_len)
