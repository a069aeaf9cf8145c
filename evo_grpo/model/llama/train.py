"""The learn pass of the Llama family: the results of the modules in fewer passes.

A and B of all agents are stacked leaves of autograd (see
`evo_grpo.model.llama.adapter_views`), to which every micro-batch adds its gradient;
`LlamaForward.collect_gradients` then gives each agent its slice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evo_grpo.errors import ShapeError
from evo_grpo.model.forward.chunks import make_chunks
from evo_grpo.model.forward.layout import RowLayout
from evo_grpo.model.forward.prefix import SharedPrefix
from evo_grpo.model.llama.adapter_views import adapter_views
from evo_grpo.model.llama.attention import Attention
from evo_grpo.model.llama.kernels import LoraLinear, RmsNorm, Span, linear, swi_glu
from evo_grpo.model.llama.weights import JoinedLayer, JoinedLinear, LlamaWeights
from evo_grpo.model.lora.slots import AdapterSlots


class LlamaForward:
    """One optimizer step, or one pass without gradient, over the joined layers.

    The adapters are in the order of the rows. None stands for the base without an adapter, and an
    adapter that several agents share is stacked once. With `recompute`, only the input of each
    layer is kept; the rest is computed again in the backward.
    """

    def __init__(
        self, slots: AdapterSlots, adapters: Sequence[str | None], *, recompute: bool = False
    ) -> None:
        self.base = slots.base
        self.adapters = tuple(dict.fromkeys(adapters))
        self.recompute = recompute
        self.weights = LlamaWeights.of(slots.base, slots.layers)
        self._views = adapter_views(slots, self.weights, self.adapters)
        # All rows of a name use its first index; so do all rows of None.
        held = reversed(list(enumerate(self._views.adapters)))
        self._places = {name: place for place, name in held}
        self._layout: RowLayout | None = None

    @contextmanager
    def rows(self, layout: RowLayout, dropout: Sequence[int] | None = None) -> Generator[None]:
        """Set the layout of the next rows, in a context that must span their backward."""
        assert dropout is None, "dropout needs the modules' own forward"
        if not set(layout.adapters) <= set(self.adapters):
            raise ShapeError(
                f"LlamaForward: expected rows of some of {self.adapters}, got {layout.adapters}"
            )
        self._layout = layout
        yield

    def hidden_at(self, ids: Tensor, where: Tensor, prefix: SharedPrefix | None = None) -> Tensor:
        """See `TrainForward`."""
        x = self._run(ids) if prefix is None else self._run_shared(prefix)
        return self._norm(
            self.weights.norm, x.index_select(0, where if prefix is None else prefix.where)
        )

    def collect_gradients(self) -> None:
        """Write the gradient of each adapter to its parameters."""
        self._views.collect_gradients(self.adapters)

    def _run(self, ids: Tensor) -> Tensor:
        """Run whole rows; return hidden states (B * T, H) before the last norm."""
        x: Tensor = self.weights.embed(ids.flatten())
        cos, sin = self.weights.rotary(ids.shape[1], x)
        return self._layers(x, (self._span(0, ids, self._current.counts, cos, sin),))

    def _run_shared(self, prefix: SharedPrefix) -> Tensor:
        """Run shared prefixes and rests; return hidden states (Q * Tp + B * C, H)."""
        x: Tensor = self.weights.embed(torch.cat([prefix.ids.flatten(), prefix.rest.flatten()]))
        cos, sin = self.weights.rotary(max(prefix.lengths) + prefix.rest.shape[1], x)
        columns = prefix.ids.shape[1]
        first = self._span(0, prefix.ids, prefix.counts, cos[:columns], sin[:columns])
        starts = prefix.row_lengths
        places = starts[:, None] + torch.arange(prefix.rest.shape[1], device=x.device)
        # Rows with prefixes of equal length share one table.
        places = places[0] if len(starts) == 1 else places[:, None]
        then = self._span(first.stop, prefix.rest, self._current.counts, cos[places], sin[places])
        return self._layers(x, (first, then), prefix)

    def _span(
        self, start: int, ids: Tensor, counts: tuple[int, ...], cos: Tensor, sin: Tensor
    ) -> Span:
        """Return a span of rows, with the number of rows of each adapter of the layout."""
        rows, columns = ids.shape
        ranks = [adapters.a.shape[1] for adapters in self._views.joined.values() if adapters]
        chunks = make_chunks(counts, columns, max(ranks, default=0), ids.device)
        places = [self._places[name] for name in self._current.adapters]
        chunks = chunks.placed(places, len(self._views.adapters), ids.device)
        return Span(start, rows, columns, chunks, cos, sin)

    @property
    def _current(self) -> RowLayout:
        assert self._layout is not None, "rows() comes first"
        return self._layout

    def _layers(
        self, x: Tensor, spans: tuple[Span, ...], prefix: SharedPrefix | None = None
    ) -> Tensor:
        w = self.weights
        attention = Attention(w.heads, w.kv_heads, spans, prefix, x)
        for layer in w.layers:
            run = partial(self._layer, layer, spans=spans, attention=attention)
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(run, x, use_reentrant=False)
            else:
                x = run(x)
        return x

    def _layer(
        self, layer: JoinedLayer, x: Tensor, *, spans: tuple[Span, ...], attention: Attention
    ) -> Tensor:
        return run_layer(layer, x, attention, partial(self._linear, spans=spans), self._norm)

    def _linear(
        self,
        base: JoinedLinear,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        spans: tuple[Span, ...],
    ) -> Tensor:
        adapters = self._views.joined[base.names]
        if adapters is None:
            return linear(x, residual, base.weight, base.bias)
        return LoraLinear.apply(
            x, residual, base.weight, base.bias, spans, adapters, adapters.a, *adapters.b
        )

    def _norm(self, module: Any, x: Tensor) -> Tensor:  # noqa: ANN401 -- a norm of the family
        return module(x) if self.base.compiled else normalized(module, x)


def run_layer(
    layer: JoinedLayer,
    x: Tensor,
    attention: Callable[[Tensor], Tensor],
    product: Callable[..., Tensor],
    norm: Callable[[nn.Module, Tensor], Tensor],
) -> Tensor:
    """Run a decoder layer on hidden states (M, H).

    `attention` maps q, k and v side by side to the outputs of the heads. `product` takes a joined
    linear layer, its input and an optional summand of its output. `norm` takes a norm of the layer
    and its input.
    """
    x = product(layer.out, attention(product(layer.qkv, norm(layer.norm_in, x))), x)
    return product(layer.down, swi_glu(product(layer.gate_up, norm(layer.norm_out, x))), x)


def normalized(module: Any, x: Tensor) -> Tensor:  # noqa: ANN401 -- a norm of the family
    """Apply a norm of the family to x (..., H)."""
    if x.device.type != "cpu":
        # One kernel in each direction, which rounds once, after the weight.
        return nn.functional.rms_norm(
            x, module.weight.shape, module.weight, module.variance_epsilon
        )
    return RmsNorm.apply(x, module.weight, module.variance_epsilon)
