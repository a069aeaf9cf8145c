"""Runs the learn pass by kernels; more agents, prefixes or LoRA ranks need no more launches.

All layers are one autograd function. A `_Kept` has the tensors that a layer saves for its backward;
it is freed after that layer's backward. The tokens of all prefixes come first, then those of all
rests; a tile has tokens of one agent. The gradients of all A and B of a layer are in one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evo_grpo.model.forward.prefix import SharedPrefix
from evo_grpo.model.forward.sending import send
from evo_grpo.model.llama.adapter_views import JoinedAdapters, block_diagonal
from evo_grpo.model.llama.cuda import operators
from evo_grpo.model.llama.cuda.generate import embedded, parts_of, rotations_of
from evo_grpo.model.llama.cuda.operators import FAILED, LEARN_TILE, OUTER_COLUMNS, TILE
from evo_grpo.model.llama.cuda.segments import Segments, WindowSegments
from evo_grpo.model.llama.train import LlamaForward
from evo_grpo.model.llama.weights import JoinedLinear
from evo_grpo.model.lora.slots import AdapterSlots

#: Programs that keep a GPU busy, and the most splits of a sum over tokens.
_PROGRAMS, _MOST_SPLITS = 512, 8


@dataclass(frozen=True)
class _Linear:
    """A joined linear layer with the adapters of a step.

    Attributes:
        weight: (out, in).
        bias: (out,) or None.
        adapters: The leaves of A and B; None without adapters.
        a: (N, R, in), the A of all parts along the rank, in the dtype of the weight.
        b: (N, R, out), the block-diagonal B.
        scale: (N, R) LoRA scaling.
        offset: Index of the first gradient of A and B in the layer's buffer of gradients.
    """

    weight: Tensor
    bias: Tensor | None
    adapters: JoinedAdapters | None
    a: Tensor
    b: Tensor
    scale: Tensor
    offset: int

    @classmethod
    @torch.no_grad()
    def of(cls, base: JoinedLinear, adapters: JoinedAdapters | None, offset: int) -> _Linear:
        """Return a joined layer with copies of its adapters."""
        weight = base.weight.detach()
        if adapters is None:
            none = weight.new_empty(0)
            return cls(weight, base.bias, None, none, none, none, offset)
        blocks = [part.block(b) for part, b in zip(adapters.parts, adapters.b, strict=True)]
        b = block_diagonal(blocks, adapters.a.shape[1], adapters.width, weight.dtype)
        scale = adapters.scale.float()
        return cls(weight, base.bias, adapters, adapters.a.to(weight.dtype), b, scale, offset)

    @property
    def numbers(self) -> int:
        """Number of elements of A and B."""
        return self.a.numel() + self.b.numel()

    def forward(self, x: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (M, out) for x (M, in), and the low columns (M, R)."""
        y = torch.nn.functional.linear(x, self.weight, self.bias)
        if self.adapters is None:
            return y, self.a  # an empty tensor costs nothing to keep
        low = operators.project(x, self.a, self.scale, tiles)
        operators.add_low(low, self.b, tiles, y)
        return y, low

    def gradients(self, grad: Tensor, tiles: Tensor, *, of_x: bool = True) -> tuple[Tensor, Tensor]:
        """Return the gradients of x, which is meaningless if not `of_x`, and of the low columns."""
        dx = torch.mm(grad, self.weight) if of_x else grad
        if self.adapters is None:
            return dx, grad
        d_low = operators.project(grad, self.b, self.scale, tiles)
        if of_x:
            operators.add_low(d_low, self.a, tiles, dx)
        return dx, d_low

    def put_gradients(self, numbers: Tensor) -> None:
        """Add this layer's gradients in the buffer `numbers` to the gradients of its leaves."""
        if self.adapters is None:
            return
        linear_grads = numbers[self.offset : self.offset + self.numbers]
        of_a, of_b = linear_grads.split([self.a.numel(), self.b.numel()])
        # A copy, so that the buffer can be freed.
        _add(self.adapters.a, of_a.view(self.a.shape).clone())
        for part, b in zip(self.adapters.parts, self.adapters.b, strict=True):
            _add(b, of_b.view(self.b.shape)[:, part.rows, part.columns].transpose(1, 2))


def _add(leaf: Tensor, grad: Tensor) -> None:
    grad = grad.to(leaf.dtype).contiguous()
    leaf.grad = grad if leaf.grad is None else leaf.grad + grad


class _Layer:
    """The linear layers of a decoder layer, and the gradients of their adapters."""

    def __init__(self, forward: KernelForward, number: int) -> None:
        self.linears: list[_Linear] = []
        self.numbers = 0
        least, agents = _PROGRAMS, forward.agents
        for base in forward.weights.layers[number].linears():
            linear = _Linear.of(base, forward.joined(base), self.numbers)
            self.linears.append(linear)
            self.numbers += linear.numbers
            blocks = sum(-(-size // OUTER_COLUMNS) for size in linear.weight.shape)
            least = min(least, agents * blocks)
        self.splits = min(_MOST_SPLITS, -(-_PROGRAMS // least))
        self.grads: Tensor | None = None

    def add(self, splits: Tensor) -> None:
        """Add the sum of splits (S, numbers) to the gradients."""
        total = splits.sum(0)
        self.grads = total if self.grads is None else self.grads.add_(total)


@dataclass
class _Kept:
    """The tensors that the backward of a layer needs.

    Attributes:
        x: Input of the layer (M, H); `normed` is the normalized input.
        joined: Concatenated q, k and v before their norms; None without norms.
        heads: q, keys and values, and the outputs of the heads.
        attention: The tensors of `Segments.attend` for `Segments.gradients`.
        middle: Input of the MLP half (M, H); `middle_normed` is the normalized input.
        added: Inputs (M, H) of the norms after attention and MLP; empty if there are no such norms.
        both: Gate and up (M, 2 I).
        lows: The low columns of the four linear layers.
    """

    x: Tensor
    normed: Tensor
    joined: Tensor | None
    heads: tuple[Tensor, Tensor, Tensor]
    attention: list[Tensor]
    middle: Tensor
    middle_normed: Tensor
    added: list[Tensor]
    both: Tensor
    lows: list[Tensor]


class KernelForward(LlamaForward):
    """Runs `LlamaForward` by kernels; the base class runs micro-batches that kernels cannot run.

    With `recompute`, only the input of each layer, plain and normalized, is kept.
    """

    def __init__(
        self, slots: AdapterSlots, adapters: Sequence[str | None], *, recompute: bool = False
    ) -> None:
        super().__init__(slots, adapters, recompute=recompute)
        self.layers = [_Layer(self, i) for i in range(len(self.weights.layers))]
        self.parts, self.norm = parts_of(self.weights)
        self.anchor = torch.zeros((), device=self.base.device, requires_grad=True)

    @property
    def agents(self) -> int:
        """Number of agents in A and B, including those without rows."""
        return len(self._views.adapters)

    def joined(self, base: JoinedLinear) -> JoinedAdapters | None:
        """Return the adapters of a joined layer."""
        return self._views.joined[base.names]

    def hidden_at(self, ids: Tensor, where: Tensor, prefix: SharedPrefix | None = None) -> Tensor:
        """See `ModuleForward.hidden_at`."""
        columns = ids.shape[1]
        if prefix is not None:
            columns = max(prefix.lengths) + prefix.rest.shape[1]
        scattered = prefix is not None and prefix.segments is None
        if scattered or self.base.derived.get(FAILED):
            return super().hidden_at(ids, where, prefix)
        batch = _Batch(self, self._current.counts, ids, prefix, columns)
        positions = where if prefix is None else prefix.where
        return _Layers.apply(self.anchor, batch, positions, torch.is_grad_enabled())

    def tables(self, spans: Sequence[tuple[Sequence[int], int]]) -> list[Tensor]:
        """Return tiles sorted by agent, the first tile of each agent, and tiles that mix agents.

        A span has the number of rows of each agent of the layout, and the number of tokens per row.
        """
        tiles: list[tuple[int, int, int]] = []
        start = 0
        for counts, columns in spans:
            for name, count in zip(self._current.adapters, counts, strict=True):
                stop = start + count * columns
                owner = self._places[name]
                firsts = range(start, stop, LEARN_TILE)
                tiles += [(owner, at, min(LEARN_TILE, stop - at)) for at in firsts]
                start = stop
        table = np.array(sorted(tiles))
        firsts = np.searchsorted(table[:, 0], np.arange(self.agents + 1))
        at = np.arange(0, start, TILE)
        plain = np.stack([at, np.minimum(TILE, start - at), 0 * at], 1)
        return send([table[:, [1, 2, 0]], firsts, plain], self.base.device)

    def collect_gradients(self) -> None:
        """Write the gradient of each adapter to its parameters."""
        for layer in self.layers:
            if layer.grads is not None:
                for linear in layer.linears:
                    linear.put_gradients(layer.grads)
                layer.grads = None
        super().collect_gradients()


class _Layers(torch.autograd.Function):
    """Runs the layers of a batch; `anchor` requires a gradient so that backward is called."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, batch: _Batch, where: Tensor, keeps: bool) -> Tensor:  # noqa: ANN401 -- as torch calls it
        """Return the final hidden states at `where`."""
        del anchor
        ctx.batch = batch
        hidden = batch.forward(keeps)
        ctx.save_for_backward(where)
        return hidden.index_select(0, where)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:  # noqa: ANN401 -- as above
        """Add the gradients of the adapters to the buffers of the layers."""
        (where,) = ctx.saved_tensors
        batch: _Batch = ctx.batch
        whole = grads[0].new_zeros(len(batch.tokens), grads[0].shape[1])
        # `where` repeats the last token of a prefix for each row. Unlike index_add_, this adds in a
        # fixed order on CUDA too.
        batch.add_gradients(whole.index_put_((where,), grads[0], accumulate=True))
        return None, None, None, None


class _Batch:
    """A micro-batch: tokens, their agents, and the tensors kept for the backward."""

    def __init__(
        self,
        run: KernelForward,
        counts: tuple[int, ...],
        ids: Tensor,
        prefix: SharedPrefix | None,
        columns: int,
    ) -> None:
        self.run, weights = run, run.weights
        self.rotations = rotations_of(weights, columns)
        order = run.base.in_order
        whole_rows = Segments(prefix, ids, in_order=order)
        #: By the windows of layers.
        self.segments = {
            w: WindowSegments(prefix, ids, w, in_order=order) if 0 < w < columns else whole_rows
            for w in {parts.window for parts in run.parts}
        }
        at = torch.arange(ids.shape[1] if prefix is None else columns, device=ids.device)
        #: Index of each token of the prefixes among the real ones, -1 for padding.
        self.places: Tensor | None = None
        if prefix is None:
            self.tokens, self.positions = ids.flatten(), at.repeat(len(ids))
            spans = [(counts, ids.shape[1])]
        else:
            prefix_ids, width = prefix.ids, prefix.rest.shape[1]
            self.tokens = torch.cat([prefix_ids.flatten(), prefix.rest.flatten()])
            rest_positions = (prefix.row_lengths[:, None] + at[:width]).expand(len(prefix.rest), -1)
            prefix_positions = at[: prefix_ids.shape[1]].repeat(len(prefix_ids))
            self.positions = torch.cat([prefix_positions, rest_positions.flatten()])
            spans = [(prefix.counts, prefix_ids.shape[1]), (counts, width)]
            self.places = _places(prefix, whole_rows)
        self.tiles, self.firsts, self.plain = run.tables(spans)
        self.kept: list[_Kept | tuple[Tensor, Tensor]] = []
        self.last: Tensor | None = None

    def forward(self, keeps: bool) -> Tensor:
        """Return the final hidden states (M, H), normalized."""
        x, normed = embedded(self.run.weights, self.run.norm, self.tokens)
        for number in range(len(self.run.parts)):
            inputs = x, normed
            x, normed, state = self._layer(number, *inputs)
            if keeps:
                self.kept.append(inputs if self.run.recompute else state)
        self.last = x if keeps else None
        return normed

    def add_gradients(self, grad: Tensor) -> None:
        """Add the gradients of the adapters, given the gradient of the final hidden states."""
        assert self.last is not None
        norm = self.run.weights.norm
        weight = norm.weight.detach()
        grad = operators.norm_backward(None, grad, self.last, weight, norm.eps)
        self.last = None
        for number in reversed(range(len(self.run.parts))):
            state = self.kept.pop()
            if not isinstance(state, _Kept):
                state = self._layer(number, *state)[2]
            grad = self._layer_backward(number, grad, state)

    def _layer(self, number: int, x: Tensor, normed: Tensor) -> tuple[Tensor, Tensor, _Kept]:
        """Run a layer; return its output, the normalized output, and tensors for the backward."""
        d, parts, tiles = self.run.weights.description, self.run.parts[number], self.tiles
        qkv, out, gate_up, down = self.run.layers[number].linears
        joined, low_qkv = qkv.forward(normed, tiles)
        q = joined.new_empty(len(x), d.heads, d.head_dim)
        kv = joined.new_empty(2, len(x), d.kv_heads, d.head_dim)
        operators.qkv(
            *_finished(joined),
            self.plain,
            self.positions,
            *self.rotations[parts.table],
            *parts.head_norms,
            q,
            *kv,
        )
        mixed, attention = self.segments[parts.window].attend(q, kv, d.scale)
        y, low_out = out.forward(mixed.flatten(1), tiles)
        factor, unused = d.residual_multiplier, self.positions
        middle, middle_normed = operators.add_norm(
            *_finished(y), unused, x, *parts.norms[0], factor
        )
        both, low_gate_up = gate_up.forward(middle_normed, tiles)
        inner = operators.gate_up(*_finished(both), self.plain, both.shape[1] // 2, d.gelu)
        z, low_down = down.forward(inner, tiles)
        output, output_normed = operators.add_norm(
            *_finished(z), unused, middle, *parts.norms[1], factor
        )
        state = _Kept(
            x, normed, joined if parts.head_norms[0] is not None else None, (q, kv, mixed),
            attention, middle, middle_normed,
            [] if parts.norms[0][0] is None else [y, z], both,
            [low_qkv, low_out, low_gate_up, low_down],
        )  # fmt: skip
        return output, output_normed, state

    def _layer_backward(self, number: int, grad: Tensor, kept: _Kept) -> Tensor:
        """Return the gradient of a layer's input; `grad` is the gradient of its output."""
        d, parts, tiles = self.run.weights.description, self.run.parts[number], self.tiles
        layer = self.run.layers[number]
        qkv, out, gate_up, down = layer.linears
        splits = grad.new_empty(layer.splits, layer.numbers, dtype=torch.float32)

        def outer(linear: _Linear, d_low: Tensor, x: Tensor, low: Tensor, grad: Tensor) -> None:
            if linear.adapters is not None:
                operators.outer(d_low, x, low, grad, tiles, self.firsts, linear.offset, splits)

        def gradient_of_update(grad: Tensor, half: int) -> Tensor:
            """Return the gradient of the output of attention (0) or MLP (1), before its norm."""
            if d.residual_multiplier != 1.0:
                grad = grad * d.residual_multiplier
            post, eps, _, _ = parts.norms[half]
            return (
                grad
                if post is None
                else operators.norm_backward(None, grad, kept.added[half], post, eps)
            )

        d_added = gradient_of_update(grad, 1)
        inner, d_low = down.gradients(d_added, tiles)
        operators.glu_backward(d.gelu, kept.both, inner)
        outer(down, d_low, inner, kept.lows[3], d_added)
        d_normed, d_low = gate_up.gradients(kept.both, tiles)
        outer(gate_up, d_low, kept.middle_normed, kept.lows[2], kept.both)
        _, _, weight, eps = parts.norms[0]
        grad = operators.norm_backward(grad, d_normed, kept.middle, weight, eps)
        d_added = gradient_of_update(grad, 0)
        d_mixed, d_low = out.gradients(d_added, tiles)
        q, kv, mixed = kept.heads
        outer(out, d_low, mixed.flatten(1), kept.lows[1], d_added)
        (dq, dk, dv), prefix_grads = self.segments[parts.window].gradients(
            d_mixed.view_as(mixed), q, kv, mixed, kept.attention, d.scale
        )
        d_joined = operators.qkv_backward(
            dq, dk, dv, prefix_grads, self.places if prefix_grads else None, kept.joined,
            self.positions, *self.rotations[parts.table],
            *parts.head_norms,
        )  # fmt: skip
        d_normed, d_low = qkv.gradients(d_joined, tiles, of_x=number > 0)
        outer(qkv, d_low, kept.normed, kept.lows[0], d_joined)
        if layer.numbers:
            layer.add(splits)
        if not number:
            return grad
        _, _, weight, eps = self.run.parts[number - 1].norms[1]
        return operators.norm_backward(grad, d_normed, kept.x, weight, eps)


def _finished(z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, int, None]:
    """Return an operator's first arguments for a z that includes adapters and bias."""
    return z, z, z, z, 0, None


def _places(prefix: SharedPrefix, segments: Segments) -> Tensor:
    """Return the index of each prefix token among the prefixes' real tokens, -1 for padding."""
    count, real = prefix.ids.numel(), segments.real
    if real is None:
        return torch.arange(count, device=prefix.ids.device)
    indices = real.new_full((count,), -1)
    return indices.index_copy_(0, real, torch.arange(len(real), device=real.device))
