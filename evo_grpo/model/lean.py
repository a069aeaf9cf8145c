"""The learn pass of the Llama family: the same numbers as the model's own modules, in fewer passes.

Within one optimizer step no weight changes. So A and B of all its agents are stacked once, as
leaves, and every micro-batch adds its gradient to them; `LeanStep.collect` then hands each agent
its slice. The number of autograd nodes does not depend on the number of agents.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evo_grpo.model.adapters import AdapterSlots
from evo_grpo.model.chunks import Chunks, cut
from evo_grpo.model.dropout import Dropout
from evo_grpo.model.kernels import LoraLinear, RmsNorm, Rotate, SwiGlu, linear
from evo_grpo.model.layout import RowLayout
from evo_grpo.model.llama import Joined, JoinedLayer, LlamaWeights, block_diagonal
from evo_grpo.model.stacks import Stack, build_stack

#: Sequences up to here attend by two batched matmuls and a softmax on the CPU, which for them are
#: faster than the blocked kernel; the scores they keep grow with the square.
_SHORT = 128


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
        self._chunks: Chunks | None = None
        self._counts: tuple[int, ...] = ()

    @contextmanager
    def rows(self, layout: RowLayout, dropout: Dropout | None = None) -> Generator[None]:
        """Say which rows come next; must span their backward."""
        assert dropout is None, "dropout goes through the modules"
        self._counts = layout.counts_of(self.adapters)
        self._chunks = None
        yield

    def hidden(self, ids: Tensor) -> Tensor:
        """Return final hidden states (B, T, H) of ids (B, T), padded on the right."""
        w = self.weights
        columns = ids.shape[1]
        x: Tensor = w.embed(ids)
        cos, sin = w.rotary(columns, x)
        self._chunks = cut(self._counts, columns, self._rank(), x.device)
        mask = None
        if columns <= _SHORT and x.device.type == "cpu":
            # (g T, T): the query heads of one key head stand one below the other.
            never = torch.full((columns, columns), float("-inf"), dtype=x.dtype).triu_(1)
            mask = never.repeat(w.heads // w.kv_heads, 1)
        for layer in w.layers:
            run = partial(self._layer, layer, cos=cos, sin=sin, mask=mask)
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(run, x, use_reentrant=False)
            else:
                x = run(x)
        return self._norm(w.norm, x)

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

    def _rank(self) -> int:
        ranks = [leaves.stack.a.shape[1] for leaves in self._leaves.values() if leaves]
        return max(ranks, default=0)

    def _layer(
        self, layer: JoinedLayer, x: Tensor, *, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> Tensor:
        w = self.weights
        joined = self._linear(layer.qkv, self._norm(layer.norm_in, x))
        q, k, v = Rotate.apply(joined, cos, sin, w.heads, w.kv_heads)
        mixed = self._attend(q, k, v, mask)
        x = self._linear(layer.out, mixed, x)
        inner = SwiGlu.apply(self._linear(layer.gate_up, self._norm(layer.norm_out, x)))
        return self._linear(layer.down, inner, x)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Causal attention: q (B, heads, T, D), k and v (B, kv, T, D) -> (B, T, heads D)."""
        rows, heads, columns, size = q.shape
        if mask is None:
            # Rows are padded on the right, which causal attention never looks at.
            mixed = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=heads != k.shape[1]
            )
        else:
            tall = q.view(rows * k.shape[1], -1, size)
            scores = torch.baddbmm(mask, tall, k.flatten(0, 1).transpose(1, 2), alpha=size**-0.5)
            mixed = torch.bmm(torch.softmax(scores, dim=-1), v.flatten(0, 1)).view(q.shape)
        return mixed.transpose(1, 2).reshape(rows, columns, -1)

    def _linear(self, joint: Joined, x: Tensor, residual: Tensor | None = None) -> Tensor:
        leaves = self._leaves[joint.names]
        if leaves is None:
            return linear(x, residual, joint.weight, joint.bias)
        a, b = leaves.stack.a, leaves.stack.b
        return LoraLinear.apply(x, residual, joint.weight, joint.bias, a, b, self._chunks)

    def _norm(self, module: Any, x: Tensor) -> Tensor:  # noqa: ANN401 -- a norm of the family
        if self.slots.base.compiled:
            return module(x)
        return RmsNorm.apply(x, module.weight, module.variance_epsilon)
