"""Comparison of the joined Llama layers with a model's own modules, once per base.

`departures` inspects the code of a model; this module runs it. One row goes through the modules
three times: without a cache, as in the learner, where each layer is compared with the joined layer
on the same input; as a prompt that fills a cache; and token by token with that cache. Layers are
compared one by one, since a difference in one layer may vanish in the sum of all. Rows are long,
since a difference may appear at late positions only. Small models use longer rows and compare the
gradient too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.chunks import make_chunks
from evo_grpo.model.forward.fused import population_forward
from evo_grpo.model.forward.layout import RowLayout
from evo_grpo.model.llama.attention import Attention
from evo_grpo.model.llama.decode import LlamaDecoder
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
#: Number of weights in the layers up to which a model is small. A small model also compares the
#: gradient of each layer, and the decoder; for larger models, only tests compare the decoder.
_SMALL = 1 << 24
#: Tokens that a small model decodes one by one. A larger model decodes one token, since each token
#: reads all weights from memory.
_STEPS = 3
#: Lower bound of a layer's update, as a share of its input, for relative errors: below it, the
#: rounding of the sum dominates.
_SHARE = 1e-2


#: One row without adapters.
_ALONE = RowLayout((None,), (1,))


class _Difference(Exception):
    """Raised with a clause that describes the difference."""


def find_difference(base: SharedBase, adapted: Mapping[str, LoraLayer]) -> str | None:
    """Return how a model differs from the joined layers, or None if they agree.

    Call this for a base without departures (see `find_departure`). The comparison bypasses the
    adapters. A device without memory for one row raises its own error.
    """
    size = sum(p.numel() for layer in layers_of(base) for p in layer.parameters())
    columns = max(_LEAST, min(_MOST, _PRODUCTS // max(1, size)))
    columns = max(2, min(columns, base.context_length or columns))
    small, steps = size <= _SMALL, min(_STEPS, columns - 1)
    with (
        # Compare the model in evaluation mode, whatever the state at the call.
        torch.inference_mode(False),
        torch.autocast(base.device.type, enabled=False),
        own_generator(base.device),
        population_forward(dict(adapted), _ALONE, frozen=True) as fused,
    ):
        special = (base.pad_id, *base.eos_ids)
        ids = probe_ids(base.vocabulary, 1, columns, special).to(base.device)
        try:
            weights = LlamaWeights(base, adapted)
            _compare_whole(weights, ids, steps if small else 1, gradient=small)
            if small:
                ours = _decoded(LlamaDecoder(weights, fused, columns), ids, steps)
                _same(ours, _cached(base, ids, steps), "decoding with a cache")
        except _Difference as difference:
            return str(difference)
        except CANNOT_RUN as problem:
            if is_out_of_memory(problem):
                raise
            return f"one of the two does not run: {type(problem).__name__}: {problem}"[:300]
    return None


def _compare_whole(weights: LlamaWeights, ids: Tensor, steps: int, *, gradient: bool) -> None:
    """Compare layer by layer, then with a cache; in float32 where that runs."""
    base = weights.base

    def compare(*, gradient: bool) -> None:
        hidden = _Layers(weights, ids, gradient=gradient).hidden()
        cached = _cached(base, ids, steps)
        _same(hidden[0, -len(cached) :], cached, "a forward with a cache")

    if base.dtype in HALF:
        # Rounding in half precision hides small differences.
        try:
            with in_float32(base.trunk):
                return compare(gradient=False)
        except CANNOT_RUN as problem:
            # Some attention kernels support only half precision.
            if is_out_of_memory(problem):
                raise
    return compare(gradient=gradient)


class _Layers:
    """One forward of the modules on ids (1, T), which compares each layer with the joined layer.

    With `gradient`, the gradient of each layer's input is compared too.
    """

    def __init__(self, weights: LlamaWeights, ids: Tensor, *, gradient: bool) -> None:
        self.weights, self.ids, self.gradient = weights, ids, gradient
        self._passed = 0
        self._attentions: dict[LayerKind, Attention] = {}
        #: Input of the present layer, and output of the last module.
        self._given = self._made = torch.empty(0)

    def hidden(self) -> Tensor:
        """Return the final hidden states (1, T, H)."""
        base = self.weights.base
        hooks: list[Any] = []
        try:
            for number, layer in enumerate(layers_of(base)):
                enter, leave = partial(self._enter, number), partial(self._leave, number)
                hooks.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
                # Before the weights are restored to half precision.
                hooks.append(layer.register_forward_hook(leave, prepend=True))
            hooks.append(self.weights.norm.module.register_forward_hook(self._norm, prepend=True))
            with torch.set_grad_enabled(self.gradient):
                hidden = base.hidden(self.ids).detach()
        finally:
            for hook in hooks:
                hook.remove()
        if self._passed != (layers := len(layers_of(base))):
            raise _Difference(f"it runs {self._passed} of {layers} layers")
        _same(hidden, self._made, "what follows its last norm")
        return hidden

    def _enter(
        self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        del module
        if number != self._passed:
            raise _Difference(f"layer {number} runs when {self._passed} layers have run")
        given: Tensor = args[0] if args else kwargs["hidden_states"]
        made = self.weights.embedded(self.ids) if number == 0 else self._made
        _same(given.detach(), made, f"what comes before layer {number}")
        self._given = given.detach().requires_grad_(self.gradient)
        if args:
            return (self._given, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._given}

    def _leave(self, number: int, module: nn.Module, args: object, output: Any) -> Any:  # noqa: ANN401 -- a tensor, or a tuple in older releases
        del args
        theirs: Tensor = output if isinstance(output, Tensor) else output[0]
        given = self._given
        ours = self._joined(number, module, given.flatten(0, 1)).view_as(theirs)
        _compare_update(ours, theirs, given, f"layer {number}")
        if self.gradient:
            along = torch.arange(theirs.numel(), device=theirs.device).sin().view_as(theirs)
            mine, own = (
                torch.autograd.grad(y, given, along.to(y.dtype))[0] for y in (ours, theirs)
            )
            _compare_update(mine, own, along, f"the gradient of layer {number}")
        self._made = theirs.detach()
        self._passed += 1
        return self._made if isinstance(output, Tensor) else (self._made, *output[1:])

    def _norm(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        del module
        self._made = output.detach()
        _same(normalized(self.weights.norm, args[0].detach()), self._made, "its last norm")

    def _joined(self, number: int, module: nn.Module, x: Tensor) -> Tensor:
        """Run a layer as the joined one, x (T, H)."""
        w = self.weights
        described = w.description
        kind = described.layers[number]
        # A copy of one layer: in half precision its weights have been widened for now.
        layer = JoinedLayer.join(module, described.family, {}, in_place=False)
        if kind not in self._attentions:
            columns = self.ids.shape[1]
            chunks = make_chunks((1,), columns, 0, x.device)
            spans = (Span(0, 1, columns, chunks, *w.rotary(columns, x, kind.table)),)
            self._attentions[kind] = attention_of(described, kind, spans, None, x)
        attention = self._attentions[kind]
        return run_layer(described, layer, x, attention, _product, normalized, normalized_heads)


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


def _cached(base: SharedBase, ids: Tensor, steps: int) -> Tensor:
    """Return the modules' hidden states (steps + 1, H) of a prompt's end and of decoded tokens."""
    cache = DynamicCache(config=base.model.config)
    first = ids.shape[1] - steps
    pieces = [ids[:, :first], *ids[:, first:].split(1, dim=1)]
    states = [base.run(cache, input_ids=part) for part in pieces]
    return torch.cat([part[0, -1:] for part in states])


def _decoded(decoder: LlamaDecoder, ids: Tensor, steps: int) -> Tensor:
    """Return these hidden states from the fast decoder."""
    columns, device = ids.shape[1], ids.device
    first = columns - steps
    states = [decoder.prefill(ids[:, :first], torch.tensor([first], device=device))]
    seen = torch.ones(1, 1, 1, columns, dtype=torch.bool, device=device)
    decoder.expand(torch.tensor([0], device=device), columns, seen)
    decoder.reserve(columns)
    places = torch.arange(first, columns, device=device).split(1)
    states += [decoder.step(ids[0, at], at) for at in places]
    return torch.cat(states)
