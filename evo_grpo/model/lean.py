"""The learn pass of the Llama family: the same numbers as the model's own modules, in fewer passes.

Within one optimizer step no weight changes. So A and B of all its agents are stacked once, as
leaves, and every micro-batch adds its gradient to them; `LeanStep.collect` then hands each agent
its slice. The number of autograd nodes does not depend on the number of agents.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from evo_grpo.model.adapters import AdapterSlots
from evo_grpo.model.attention import SHORT, after_prefix, attend
from evo_grpo.model.chunks import cut
from evo_grpo.model.dropout import Dropout
from evo_grpo.model.kernels import LoraLinear, RmsNorm, Rotate, Span, SwiGlu, linear
from evo_grpo.model.layout import RowLayout
from evo_grpo.model.llama import Joined, JoinedLayer, LlamaWeights, block_diagonal
from evo_grpo.model.prefixes import SharedPrefix
from evo_grpo.model.stacks import Stack, build_stack

#: Takes q, k and v of every span, returns what they attend to (B, heads, T, D) of every span.
Attention = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class _Part:
    """Where one adapted linear layer stands in the stack of the layers it is joined with."""

    name: str
    row: int
    rank: int
    column: int
    size: int


@dataclass(frozen=True)
class _Leaves:
    """The stacked adapters of joined layers, as leaves of autograd."""

    stack: Stack
    parts: tuple[_Part, ...]


class LeanStep:
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
        joints = {j.names: j for layer in self.weights.layers for j in layer.joints()}
        self._leaves = {names: self._stack(joint) for names, joint in joints.items()}
        self._layout: RowLayout | None = None

    @contextmanager
    def rows(self, layout: RowLayout, dropout: Dropout | None = None) -> Generator[None]:
        """Say which rows come next; must span their backward."""
        assert dropout is None, "dropout goes through the modules"
        layout.counts_of(self.adapters)  # refuses rows of other adapters
        self._layout = layout
        yield

    def hidden(self, ids: Tensor) -> Tensor:
        """Return final hidden states (B, T, H) of ids (B, T), padded on the right."""
        return self._norm(self.weights.norm, self._run(ids)).view(*ids.shape, -1)

    def picked(self, ids: Tensor, where: Tensor, prefix: SharedPrefix | None = None) -> Tensor:
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

    def collect(self) -> None:
        """Hand every adapter its gradient."""
        for leaves in self._leaves.values():
            if leaves is None or leaves.stack.a.grad is None or leaves.stack.b.grad is None:
                continue
            for part in leaves.parts:
                self._hand_out(part, leaves.stack.a.grad, leaves.stack.b.grad)

    def _hand_out(self, part: _Part, a: Tensor, b: Tensor) -> None:
        layer: Any = self.slots.layers[part.name]
        scales = b.new_tensor([layer.scaling.get(str(name), 0.0) for name in self.adapters])
        rows = slice(part.row, part.row + part.rank)
        mine = b[:, rows, part.column : part.column + part.size]
        # B is stored (out, R); one copy for all agents.
        turned = (mine * scales[:, None, None]).transpose(1, 2).contiguous()
        for name, grad_a, grad_b in zip(
            self.adapters, a[:, rows].unbind(), turned.unbind(), strict=True
        ):
            if name is None or name not in layer.lora_A:
                continue
            weight_a, weight_b = layer.lora_A[name].weight, layer.lora_B[name].weight
            rank = len(weight_a)
            whole = rank == part.rank
            weight_a.grad = grad_a if whole else grad_a[:rank]
            weight_b.grad = grad_b if whole else grad_b[:, :rank].contiguous()

    @torch.no_grad()
    def _stack(self, joint: Joined) -> _Leaves | None:
        layers = self.slots.layers
        stacks: list[Stack | None] = []
        parts: list[_Part] = []
        row = column = 0
        for name, size in zip(joint.names, joint.sizes, strict=True):
            known = name in layers and any(a in layers[name].lora_A for a in self.adapters if a)
            stack = build_stack(layers[name], self.adapters, None) if known else None
            stacks.append(stack)
            if stack is not None:
                parts.append(_Part(name, row, stack.a.shape[1], column, size))
                row += stack.a.shape[1]
            column += size
        whole = block_diagonal(stacks, joint.sizes)
        if whole is None:
            return None
        # Under no_grad a stack of one agent is a view of its parameters, and no leaf of its own.
        a, b = (t.detach().contiguous().requires_grad_() for t in (whole.a, whole.b))
        return _Leaves(Stack(a, b), tuple(parts))

    def _run(self, ids: Tensor) -> Tensor:
        """Run whole rows: hidden states (B * T, H) before the last norm."""
        x: Tensor = self.weights.embed(ids.flatten())
        cos, sin = self.weights.rotary(ids.shape[1], x)
        span = self._span(0, ids, self._counts(None), cos, sin)
        causal = self._causal(span, x)
        return self._layers(x, (span,), lambda q, k, v: (attend(q, k, v, causal),))

    def _run_shared(self, prefix: SharedPrefix) -> Tensor:
        """Run beginnings and rests: hidden states (Q * P + B * C, H) before the last norm."""
        x: Tensor = self.weights.embed(torch.cat([prefix.ids.flatten(), prefix.rest.flatten()]))
        cos, sin = self.weights.rotary(max(prefix.lengths) + prefix.rest.shape[1], x)
        columns = prefix.ids.shape[1]
        first = self._span(0, prefix.ids, self._counts(prefix), cos[:columns], sin[:columns])
        starts = torch.tensor(prefix.lengths, device=x.device).index_select(0, prefix.source)
        alike = len(set(prefix.lengths)) == 1
        if alike:
            starts = starts[:1]  # one mask and one table serve all rows
        places = starts[:, None] + torch.arange(prefix.rest.shape[1], device=x.device)
        places = places[0] if alike else places[:, None]
        then = self._span(first.stop, prefix.rest, self._counts(None), cos[places], sin[places])
        causal = self._causal(first, x)
        mask = after_prefix(starts, columns, then.columns, x.dtype)

        def both(*parts: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v, q_then, k_then, v_then = parts
            keys = torch.cat([k.index_select(0, prefix.source), k_then], dim=2)
            values = torch.cat([v.index_select(0, prefix.source), v_then], dim=2)
            return attend(q, k, v, causal), attend(q_then, keys, values, mask)

        return self._layers(x, (first, then), both)

    def _counts(self, prefix: SharedPrefix | None) -> tuple[int, ...]:
        """Rows, or beginnings, per adapter of the step."""
        assert self._layout is not None, "rows() comes first"
        layout = self._layout
        if prefix is not None:
            layout = RowLayout(layout.adapters, prefix.counts)
        return layout.counts_of(self.adapters)

    def _span(
        self, start: int, ids: Tensor, counts: tuple[int, ...], cos: Tensor, sin: Tensor
    ) -> Span:
        ranks = [leaves.stack.a.shape[1] for leaves in self._leaves.values() if leaves]
        rows, columns = ids.shape
        chunks = cut(counts, columns, max(ranks, default=0), ids.device)
        return Span(start, rows, columns, chunks, cos, sin)

    def _layers(self, x: Tensor, spans: tuple[Span, ...], attention: Attention) -> Tensor:
        for layer in self.weights.layers:
            run = partial(self._layer, layer, spans=spans, attention=attention)
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(run, x, use_reentrant=False)
            else:
                x = run(x)
        return x

    def _layer(
        self, layer: JoinedLayer, x: Tensor, *, spans: tuple[Span, ...], attention: Attention
    ) -> Tensor:
        w = self.weights
        joined = self._linear(layer.qkv, self._norm(layer.norm_in, x), spans)
        mixed = attention(*Rotate.apply(joined, w.heads, w.kv_heads, spans))
        flat = [part.transpose(1, 2).flatten(0, 1).flatten(1) for part in mixed]
        x = self._linear(layer.out, flat[0] if len(flat) == 1 else torch.cat(flat), spans, x)
        inner = self._linear(layer.gate_up, self._norm(layer.norm_out, x), spans)
        return self._linear(layer.down, SwiGlu.apply(inner), spans, x)

    def _causal(self, span: Span, like: Tensor) -> Tensor | None:
        """Return the mask of short rows (T, T), or None where the kernel has its own."""
        if span.columns > SHORT or like.device.type != "cpu":
            return None
        never = torch.full((span.columns, span.columns), float("-inf"), dtype=like.dtype)
        return never.triu_(1)

    def _linear(
        self, joint: Joined, x: Tensor, spans: tuple[Span, ...], residual: Tensor | None = None
    ) -> Tensor:
        leaves = self._leaves[joint.names]
        if leaves is None:
            return linear(x, residual, joint.weight, joint.bias)
        a, b = leaves.stack.a, leaves.stack.b
        return LoraLinear.apply(x, residual, joint.weight, joint.bias, a, b, spans)

    def _norm(self, module: Any, x: Tensor) -> Tensor:  # noqa: ANN401 -- a norm of the family
        if self.slots.base.compiled:
            return module(x)
        return RmsNorm.apply(x, module.weight, module.variance_epsilon)
