"""Comparison of the joined Llama layers with a model's own modules, once per base.

`choice` inspects the code of a model; this module runs it. One row goes through the modules, and
each layer is compared with the joined layer on the same input, since a difference in one layer may
vanish in the sum of all. The row is long, since a difference may appear at late positions only.
Small models use a longer one and compare the gradient too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.chunks import make_chunks
from evo_grpo.model.forward.fused import population_forward
from evo_grpo.model.forward.layout import RowLayout
from evo_grpo.model.llama.attention import Attention
from evo_grpo.model.llama.families import LayerKind
from evo_grpo.model.llama.kernels import Span, linear
from evo_grpo.model.llama.train import attention_of, normalized, normalized_heads, run_layer
from evo_grpo.model.llama.weights import JoinedLayer, JoinedLinear, LlamaWeights, layers_of
from evo_grpo.model.out_of_memory import is_out_of_memory
from evo_grpo.model.probing import (
    CANNOT_RUN,
    own_generator,
    probe_ids,
    relative_error,
    tolerance,
)
from evo_grpo.model.upcast import HALF, in_float32

#: Minimum and maximum tokens of the row, and tokens times weights of the layers in between.
_LEAST, _MOST, _PRODUCTS = 24, 160, 1 << 26
#: Number of weights in the layers up to which a model also compares the gradient of each layer.
_SMALL = 1 << 24
#: Lower bound of a layer's update, as a share of its input, for relative errors: below it, the
#: rounding of the sum dominates.
_SHARE = 1e-2


#: One row without adapters.
_ALONE = RowLayout((None,), (1,))


class _Difference(Exception):
    """Raised with a clause that describes the difference."""


def find_difference(base: SharedBase, adapted: Mapping[str, LoraLayer]) -> str | None:
    """Return how a model differs from the joined layers, or None if they agree.

    Call this for a base without departures (see `find_departures`). The comparison bypasses the
    adapters. A device without memory for one row raises its own error.
    """
    size = sum(p.numel() for layer in layers_of(base) for p in layer.parameters())
    columns = max(_LEAST, min(_MOST, _PRODUCTS // max(1, size)))
    columns = max(2, min(columns, base.context_length or columns))
    with (
        # Compare the model in evaluation mode, whatever the state at the call.
        torch.inference_mode(False),
        torch.autocast(base.device.type, enabled=False),
        own_generator(base.device),
        population_forward(dict(adapted), _ALONE, frozen=True),
    ):
        special = (base.pad_id, *base.eos_ids)
        ids = probe_ids(base.vocabulary, 1, columns, special).to(base.device)
        try:
            weights = LlamaWeights(base, adapted)
            if base.dtype in HALF:
                # Rounding in half precision hides small differences.
                try:
                    with in_float32(base.trunk):
                        return _compare(weights, ids, gradient=False)
                except CANNOT_RUN as problem:
                    # Some attention kernels support only half precision.
                    if is_out_of_memory(problem):
                        raise
            _compare(weights, ids, gradient=size <= _SMALL)
        except _Difference as difference:
            return str(difference)
        except CANNOT_RUN as problem:
            if is_out_of_memory(problem):
                raise
            return f"one of the two does not run: {type(problem).__name__}: {problem}"[:300]
    return None


def _compare(weights: LlamaWeights, ids: Tensor, *, gradient: bool) -> None:
    """Run the modules on ids (1, T); raise `_Difference` for the first layer that differs.

    With `gradient`, the gradient of each layer's input is compared too.
    """
    base, norm, layers = weights.base, weights.norm, layers_of(weights.base)
    attentions: dict[LayerKind, Attention] = {}
    #: The input of the first layer, and the output of each layer and of the last norm.
    passed = [weights.embedded(ids)]

    def of_layer(
        number: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,  # noqa: ANN401 -- a tensor, or a tuple in older releases
    ) -> None:
        if number != len(passed) - 1:
            raise _Difference(f"layer {number} runs when {len(passed) - 1} layers have run")
        rest = dict(kwargs)
        given: Tensor = args[0] if args else rest.pop("hidden_states")
        _same(given, passed[-1], f"what comes before layer {number}")
        theirs = _states(output)
        _compare_update(
            _joined(weights, attentions, number, module, given), theirs, given, f"layer {number}"
        )
        if gradient:
            with torch.enable_grad():
                x = given.detach().requires_grad_()
                own = _states(module.forward(x, *args[1:], **rest))
                ours = _joined(weights, attentions, number, module, x)
            along = torch.arange(own.numel(), device=own.device).sin().view_as(own)
            mine, own = (torch.autograd.grad(y, x, along.to(y.dtype))[0] for y in (ours, own))
            _compare_update(mine, own, along, f"the gradient of layer {number}")
        passed.append(theirs)

    def of_norm(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        del module
        _same(normalized(norm, args[0]), output, "its last norm")
        passed.append(output)

    # Before the weights are restored to half precision.
    hooks: list[Any] = [
        layer.register_forward_hook(partial(of_layer, number), prepend=True, with_kwargs=True)
        for number, layer in enumerate(layers)
    ]
    hooks.append(norm.module.register_forward_hook(of_norm, prepend=True))
    try:
        hidden = base.hidden(ids)
    finally:
        for hook in hooks:
            hook.remove()
    if len(passed) != len(layers) + 2:
        raise _Difference(f"it runs {len(passed) - 2} of {len(layers)} layers")
    _same(hidden, passed[-1], "what follows its last norm")


def _states(output: Any) -> Tensor:  # noqa: ANN401 -- a tensor, or a tuple in older releases
    return output if isinstance(output, Tensor) else output[0]


def _joined(
    weights: LlamaWeights,
    attentions: dict[LayerKind, Attention],
    number: int,
    module: nn.Module,
    x: Tensor,
) -> Tensor:
    """Run a layer as the joined one, x (1, T, H)."""
    described = weights.description
    kind = described.layers[number]
    # A copy of one layer: in half precision its weights have been widened for now.
    layer = JoinedLayer.join(module, described.family, {}, in_place=False)
    if kind not in attentions:
        columns = x.shape[1]
        chunks = make_chunks((1,), columns, 0, x.device)
        spans = (Span(0, 1, columns, chunks, *weights.rotary(columns, x[0], kind.table)),)
        attentions[kind] = attention_of(described, kind, spans, None, x[0])
    run = attentions[kind]
    return run_layer(described, layer, x[0], run, _product, normalized, normalized_heads)[None]


def _product(base: JoinedLinear, x: Tensor, residual: Tensor | None = None) -> Tensor:
    return linear(x, residual, base.weight, base.bias)


def _same(ours: Tensor, theirs: Tensor, what: str) -> None:
    error, allowed = relative_error(ours, theirs), tolerance(theirs)
    if error > allowed:
        raise _Difference(f"{what} differs by {error:.2g} of its size")


def _compare_update(ours: Tensor, theirs: Tensor, before: Tensor, what: str) -> None:
    """Compare the difference between output and input of a layer."""
    given = before.detach()
    added = theirs.detach() - given
    size = torch.maximum(_size(added), _SHARE * _size(given))
    error = float((_size(ours.detach() - theirs.detach()) / size.clamp_min(1e-9)).max())
    if not error <= tolerance(theirs):
        raise _Difference(f"{what} differs by {error:.2g} of what it adds")


def _size(values: Tensor) -> Tensor:
    return values.float().pow(2).mean(-1).sqrt()
