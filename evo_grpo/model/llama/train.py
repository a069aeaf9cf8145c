"""Runs the learn pass of the Llama family, with fewer passes over memory than the modules.

Every micro-batch adds its gradient to stacked leaves, the A and B of all agents (see
`evo_grpo.model.llama.adapter_views`); `LlamaForward.collect_gradients` then gives each agent its
slice.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evo_grpo.model.forward.prefix import SharedPrefix
from evo_grpo.model.forward.stacks import Chunks, RowLayout, make_chunks
from evo_grpo.model.llama.adapter_views import adapter_views
from evo_grpo.model.llama.attention import Attention
from evo_grpo.model.llama.families import Description
from evo_grpo.model.llama.functions import LoraLinear, RmsNorm, Span, glu, linear
from evo_grpo.model.llama.weights import JoinedLayer, JoinedLinear, LlamaWeights, Norm
from evo_grpo.model.lora.slots import AdapterSlots


class LlamaForward:
    """The forward over the joined layers for one optimizer step, or for a pass without gradient.

    `adapters` are in the order of their rows; None is the base alone, and a repeated adapter is
    stacked once. With `recompute`, only the input of each layer is kept for the backward.
    """

    def __init__(
        self, slots: AdapterSlots, adapters: Sequence[str | None], *, recompute: bool = False
    ) -> None:
        self.base = slots.base
        self.adapters = tuple(dict.fromkeys(adapters))
        self.recompute = recompute
        self.weights = LlamaWeights.of(slots.base, slots.layers)
        self._views = adapter_views(slots, self.weights, self.adapters)
        # The first index of each name, and of None.
        indexed = reversed(list(enumerate(self._views.adapters)))
        self._places = {name: index for index, name in indexed}
        self._layout: RowLayout | None = None

    @contextmanager
    def rows(self, layout: RowLayout, dropout: Sequence[int] | None = None) -> Generator[None]:
        """Set the layout of the next rows, in a context that must span their backward."""
        assert dropout is None, "dropout needs the modules' own forward"
        self._layout = layout
        yield

    def hidden_at(self, ids: Tensor, where: Tensor, prefix: SharedPrefix | None = None) -> Tensor:
        """See `ModuleForward.hidden_at`."""
        x = self._run(ids) if prefix is None else self._run_shared(prefix)
        where = where if prefix is None else prefix.where
        return normalized(self.weights.norm, x.index_select(0, where))

    def collect_gradients(self) -> None:
        """Write the gradient of each adapter to its parameters."""
        self._views.collect_gradients(self.adapters)

    def _run(self, ids: Tensor) -> Tensor:
        """Run whole rows; return hidden states (B * T, H) before the last norm."""
        x = self.weights.embedded(ids.flatten())
        rows, columns = ids.shape
        chunks = self._chunks(ids, self._current.counts)

        def spans(table: str | None) -> tuple[Span, ...]:
            return (Span(0, rows, columns, chunks, *self.weights.rotary(columns, x, table)),)

        return self._layers(x, spans)

    def _run_shared(self, prefix: SharedPrefix) -> Tensor:
        """Run shared prefixes and rests; return hidden states (Q * Tp + B * C, H)."""
        x = self.weights.embedded(torch.cat([prefix.ids.flatten(), prefix.rest.flatten()]))
        prefixes, prefix_columns = prefix.ids.shape
        rows, rest_columns = prefix.rest.shape
        starts = prefix.row_lengths
        positions = starts[:, None] + torch.arange(rest_columns, device=x.device)
        # Rows with prefixes of equal length share one table.
        positions = positions[0] if len(starts) == 1 else positions[:, None]
        chunks = self._chunks(prefix.ids, prefix.counts)
        rest_chunks = self._chunks(prefix.rest, self._current.counts)

        def spans(table: str | None) -> tuple[Span, ...]:
            cos, sin = self.weights.rotary(max(prefix.lengths) + rest_columns, x, table)
            rest_sin = None if sin is None else sin[positions]
            sin = None if sin is None else sin[:prefix_columns]
            prefix_span = Span(0, prefixes, prefix_columns, chunks, cos[:prefix_columns], sin)
            return prefix_span, Span(
                prefix_span.stop, rows, rest_columns, rest_chunks, cos[positions], rest_sin
            )

        return self._layers(x, spans, prefix)

    def _chunks(self, ids: Tensor, counts: tuple[int, ...]) -> Chunks:
        """Return the chunks of ids (B, T) that have `counts[i]` rows of the layout's adapter i."""
        ranks = [adapters.a.shape[1] for adapters in self._views.joined.values() if adapters]
        chunks = make_chunks(counts, ids.shape[1], max(ranks, default=0), ids.device)
        indices = [self._places[name] for name in self._current.adapters]
        return chunks.placed(indices, len(self._views.adapters), ids.device)

    @property
    def _current(self) -> RowLayout:
        assert self._layout is not None, "rows() comes first"
        return self._layout

    def _layers(
        self,
        x: Tensor,
        spans: Callable[[str | None], tuple[Span, ...]],
        prefix: SharedPrefix | None = None,
    ) -> Tensor:
        """Run all layers on x (M, H); `spans` maps a rotary table to the spans of the batch."""
        d = self.weights.description
        attentions = {
            kind: Attention(
                d.heads, d.kv_heads, spans(kind.table), prefix, x, scale=d.scale, window=kind.window
            )
            for kind in dict.fromkeys(d.layers)
        }
        for layer, kind in zip(self.weights.layers, d.layers, strict=True):
            run = partial(self._layer, layer, attention=attentions[kind])
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(run, x, use_reentrant=False)
            else:
                x = run(x)
        return x

    def _layer(self, layer: JoinedLayer, x: Tensor, *, attention: Attention) -> Tensor:
        product = partial(self._linear, spans=attention.spans)
        return run_layer(self.weights.description, layer, x, attention, product)

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


def run_layer(
    description: Description,
    layer: JoinedLayer,
    x: Tensor,
    attention: Callable[[Tensor], Tensor],
    product: Callable[..., Tensor],
) -> Tensor:
    """Run a decoder layer on hidden states (M, H).

    `attention` maps concatenated q, k and v to the outputs of the heads. `product` takes a joined
    linear layer, its input and an optional summand of its output.
    """
    before, after, before_mlp, after_mlp = layer.norms

    def added(base: JoinedLinear, inner: Tensor, x: Tensor, after: Norm | None) -> Tensor:
        if after is None and description.residual_multiplier == 1.0:
            return product(base, inner, x)
        y = product(base, inner)
        if after is not None:
            y = normalized(after, y)
        return torch.add(x, y, alpha=description.residual_multiplier)

    qkv = product(layer.qkv, x if before is None else normalized(before, x))
    if layer.head_norms:
        qkv = _normalized_heads(description, layer, qkv)
    x = added(layer.out, attention(qkv), x, after)
    gate_and_up = product(layer.gate_up, x if before_mlp is None else normalized(before_mlp, x))
    inner = glu(gate_and_up, gelu=description.gelu)
    return added(layer.down, inner, x, after_mlp)


def normalized(norm: Norm, x: Tensor) -> Tensor:
    """Apply a norm of the model to x (..., H)."""
    weight = norm.weight
    if x.device.type == "cpu":
        return RmsNorm.apply(x, weight, norm.eps, norm.rounds_once)
    # One kernel in each direction, which rounds once, after the weight.
    if weight.dtype == x.dtype:
        return nn.functional.rms_norm(x, weight.shape, weight, norm.eps)
    return nn.functional.rms_norm(x.float(), weight.shape, weight, norm.eps).to(x.dtype)


def _normalized_heads(d: Description, layer: JoinedLayer, joined: Tensor) -> Tensor:
    """Apply the norms of q and k to concatenated q, k and v (M, (heads + 2 kv_heads) D)."""
    *parts, v = joined.split([n * d.head_dim for n in (d.heads, d.kv_heads, d.kv_heads)], dim=-1)
    rows = (-1,) if d.family.head_norms == "all" else (-1, d.head_dim)
    normed = [
        normalized(head_norm, part.unflatten(-1, rows)).flatten(1)
        for head_norm, part in zip(layer.head_norms, parts, strict=True)
    ]
    return torch.cat([*normed, v], dim=-1)
