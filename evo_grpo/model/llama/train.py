"""The learn pass of the Llama family: the same numbers as the model's own modules, in fewer passes.

A and B of all agents lie side by side as leaves of autograd (see
`evo_grpo.model.llama.adapter_views`), to which every micro-batch adds its gradient;
`LlamaForward.collect_gradients` then gives each agent its slice.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from evo_grpo.errors import ShapeError
from evo_grpo.model.forward.chunks import make_chunks
from evo_grpo.model.forward.dropout import Dropout
from evo_grpo.model.forward.layout import RowLayout
from evo_grpo.model.forward.prefix import SharedPrefix
from evo_grpo.model.llama.adapter_views import adapter_views
from evo_grpo.model.llama.attention import Attention
from evo_grpo.model.llama.kernels import LoraLinear, RmsNorm, Span, linear, swi_glu
from evo_grpo.model.llama.weights import JoinedLayer, JoinedLinear, LlamaWeights
from evo_grpo.model.lora.slots import AdapterSlots


class LlamaForward:
    """One optimizer step, or one pass without gradient, over the joined layers.

    Args:
        slots: The adapters.
        adapters: N names in the order of the rows; None goes through the base alone.
        recompute: Keep only each layer's input, and compute the rest again in the backward.
    """

    def __init__(
        self, slots: AdapterSlots, adapters: Sequence[str | None], *, recompute: bool = False
    ) -> None:
        """Stack the adapters."""
        self.slots = slots
        self.adapters = tuple(adapters)
        self.recompute = recompute
        self.weights = LlamaWeights.of(slots.base, slots.layers)
        self._views = adapter_views(slots, self.weights, self.adapters)
        # The first place of a name serves all its rows; so does the first None.
        held = reversed(list(enumerate(self._views.adapters)))
        self._places = {name: place for place, name in held}
        self._layout: RowLayout | None = None

    @contextmanager
    def rows(self, layout: RowLayout, dropout: Dropout | None = None) -> Generator[None]:
        """Say which rows come next; must span their backward."""
        assert dropout is None, "dropout needs the modules' own forward"
        if not set(layout.adapters) <= set(self.adapters):
            raise ShapeError(
                f"LlamaForward: expected rows of some of {self.adapters}, got {layout.adapters}"
            )
        self._layout = layout
        yield

    def hidden_at(self, ids: Tensor, where: Tensor, prefix: SharedPrefix | None = None) -> Tensor:
        """Return the final hidden states (M, H) at flat positions of ids (B, T).

        Args:
            ids: (B, T) int64, padded on the right.
            where: (M,) positions in B * T.
            prefix: The same rows and positions, cut into what they share and the rest.
        """
        x = self._run(ids) if prefix is None else self._run_shared(prefix)
        return self._norm(
            self.weights.norm, x.index_select(0, where if prefix is None else prefix.where)
        )

    def collect_gradients(self) -> None:
        """Give every adapter its gradient."""
        self._views.collect_gradients(self.adapters)

    def _run(self, ids: Tensor) -> Tensor:
        """Run whole rows: hidden states (B * T, H) before the last norm."""
        x: Tensor = self.weights.embed(ids.flatten())
        cos, sin = self.weights.rotary(ids.shape[1], x)
        return self._layers(x, (self._span(0, ids, self._current.counts, cos, sin),))

    def _run_shared(self, prefix: SharedPrefix) -> Tensor:
        """Run beginnings and rests: hidden states (Q * Tp + B * C, H) before the last norm."""
        x: Tensor = self.weights.embed(torch.cat([prefix.ids.flatten(), prefix.rest.flatten()]))
        cos, sin = self.weights.rotary(max(prefix.lengths) + prefix.rest.shape[1], x)
        columns = prefix.ids.shape[1]
        first = self._span(0, prefix.ids, prefix.counts, cos[:columns], sin[:columns])
        starts = prefix.lengths_of_rows(x.device)
        places = starts[:, None] + torch.arange(prefix.rest.shape[1], device=x.device)
        # One table serves rows whose beginnings have one length.
        places = places[0] if len(starts) == 1 else places[:, None]
        then = self._span(first.stop, prefix.rest, self._current.counts, cos[places], sin[places])
        return self._layers(x, (first, then), prefix)

    def _span(
        self, start: int, ids: Tensor, counts: tuple[int, ...], cos: Tensor, sin: Tensor
    ) -> Span:
        """Describe rows: how many each adapter of the layout has."""
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
        joined = self._linear(layer.qkv, self._norm(layer.norm_in, x), spans)
        x = self._linear(layer.out, attention(joined), spans, x)
        inner = self._linear(layer.gate_up, self._norm(layer.norm_out, x), spans)
        return self._linear(layer.down, swi_glu(inner), spans, x)

    def _linear(
        self, base: JoinedLinear, x: Tensor, spans: tuple[Span, ...], residual: Tensor | None = None
    ) -> Tensor:
        adapters = self._views.joined[base.names]
        if adapters is None:
            return linear(x, residual, base.weight, base.bias)
        return LoraLinear.apply(
            x, residual, base.weight, base.bias, spans, adapters, adapters.a, *adapters.b
        )

    def _norm(self, module: Any, x: Tensor) -> Tensor:  # noqa: ANN401 -- a norm of the family
        if self.slots.base.compiled:
            return module(x)
        return RmsNorm.apply(x, module.weight, module.variance_epsilon)
