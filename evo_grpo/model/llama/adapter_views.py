"""Stacks the adapters of a learn step as autograd leaves.

Weights do not change within an optimizer step, so every micro-batch adds its gradient to the same
leaves, the A and B of all agents: the number of autograd nodes does not depend on the number of
agents. If all trained slots have the same shapes, their parameters become views of these leaves, so
nothing is copied, and an agent needs memory only for its adapter, its gradient and its moments.
Slots of different shapes are copied and padded instead.

For concatenated q, k and v, the A are stacked along the rank, and the B are blocks on a diagonal.
The block-diagonal B takes one product, mostly with zeros; separate blocks take one product each. On
a GPU, a further launch costs more than the zeros. On a CPU, where small products are slow for their
size, the zeros cost little at small ranks, but half of the time at rank 32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from evo_grpo.model.forward.stacks import Stack, adapter_weights
from evo_grpo.model.llama.weights import JoinedLinear, LlamaWeights
from evo_grpo.model.lora.slots import AdapterSlots

#: Minimum rank for separate products on a CPU: below it, they double the time of gradients.
_LEAST_RANK = 16
#: Multiply-adds of one CPU core in the time that a further batched product needs to start.
_START = 1 << 20


class Block(NamedTuple):
    """A block `b` (N, rank, outputs) of a joined B, and its `rows` (ranks) and `columns` there."""

    rows: slice
    columns: slice
    b: Tensor


def multiplies_separately(ranks: Sequence[int], device: torch.device) -> bool:
    """Return whether a product per part may be faster than one for all, given the parts' ranks."""
    return device.type == "cpu" and min(ranks) >= _LEAST_RANK


def block_diagonal(blocks: Sequence[Block], ranks: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return a block-diagonal B (N, ranks, width) that has `blocks`, and zeros elsewhere."""
    joined = blocks[0].b.new_zeros(len(blocks[0].b), ranks, width, dtype=dtype)
    for rows, columns, b in blocks:
        joined[:, rows, columns] = b
    return joined


@dataclass(frozen=True)
class JoinedStack:
    """The stacked adapters of joined linear layers.

    Attributes:
        a: (N, R, in), the A of all parts, stacked along the rank.
        parts: The B of each adapted part, times the scaling.
        width: Output features of all parts.
    """

    a: Tensor
    parts: tuple[Block, ...]
    width: int

    @classmethod
    def of(cls, stacks: Sequence[Stack | None], sizes: Sequence[int]) -> JoinedStack | None:
        """Join stacks of layers with `sizes` output features; None if no layer has adapters."""
        parts: list[Block] = []
        row = column = 0
        for stack, size in zip(stacks, sizes, strict=True):
            if stack is not None:
                ranks = stack.b.shape[1]
                rows, columns = slice(row, row + ranks), slice(column, column + size)
                parts.append(Block(rows, columns, stack.b))
                row += ranks
            column += size
        downs = [stack.a for stack in stacks if stack is not None]
        if not downs:
            return None
        a = downs[0] if len(downs) == 1 else torch.cat(downs, dim=1)
        joined = cls(a, tuple(parts), column)
        apart = multiplies_separately([part.b.shape[1] for part in parts], a.device)
        return joined if apart else cls(a, joined._one, column)

    def blocks(self, tokens: int) -> tuple[Block, ...]:
        """Return separate blocks or one joined block, whichever is faster for `tokens` tokens."""
        block_elements = sum(b[0].numel() for _, _, b in self.parts)
        saved_products = tokens * (self.a.shape[1] * self.width - block_elements)
        return self.parts if saved_products >= (len(self.parts) - 1) * _START else self._one

    @cached_property
    def _one(self) -> tuple[Block, ...]:
        if len(self.parts) == 1:
            return self.parts
        joined = block_diagonal(self.parts, self.a.shape[1], self.width, self.a.dtype)
        return (Block(slice(None), slice(None), joined),)


#: Maximum elements of what is cached for a step: the block-diagonal B of joined layers, and A and B
#: in the dtype of the base. Caching larger ones would double the memory of an agent. On devices the
#: limit is higher, since a launch costs as much for a small tensor as for a larger one.
KEPT_ELEMENTS = 1 << 17
KEPT_DEVICE_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class Part:
    """An adapted linear layer that is part of a joined layer.

    Attributes:
        name: Module name of the layer.
        rows: Rows of the layer's A in the joined A; as many as the largest LoRA rank of all slots.
        columns: Columns of the layer's output in the joined output.
    """

    name: str
    rows: slice
    columns: slice

    @property
    def rank(self) -> int:
        """The largest LoRA rank of this layer in all slots."""
        return self.rows.stop - self.rows.start

    def block(self, b: Tensor) -> Block:
        """Return the part's block of the joined B, given its leaf (N, outputs, rank)."""
        return Block(self.rows, self.columns, b.transpose(1, 2))


@dataclass(frozen=True)
class JoinedAdapters:
    """The adapters of joined linear layers.

    Attributes:
        a: (N, R, in) leaf, the A of all parts, stacked along the rank.
        b: (N, size, rank) leaf of each part.
        scale: (N, R) LoRA scaling of each row of A.
        width: Output features of all parts.
        kept: Cache of tensors computed from A, B and scale in this step; None to cache nothing.
    """

    a: Tensor
    b: tuple[Tensor, ...]
    scale: Tensor
    parts: tuple[Part, ...]
    width: int
    kept: dict[tuple[str, torch.dtype], Tensor] | None = None

    def down(self, a: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the leaf `a` (N, R, in), the A of all parts, in `dtype`."""
        return self._once("a", dtype, lambda: a.to(dtype))

    def scales(self, dtype: torch.dtype) -> Tensor:
        """Return the LoRA scaling as (N, 1, R) of `dtype`."""
        return self._once("scale", dtype, lambda: self.scale.to(dtype))[:, None]

    def blocks(self, b: Sequence[Tensor], dtype: torch.dtype) -> tuple[Block, ...]:
        """Return separate blocks of the leaves `b` or one joined block, whichever is faster."""
        parts = list(zip(self.parts, b, strict=True))
        if len(parts) == 1 or multiplies_separately(
            [part.rank for part in self.parts], self.a.device
        ):
            return tuple(
                Block(p.rows, p.columns, self._once(p.name, dtype, partial(_up, leaf, dtype)))
                for p, leaf in parts
            )
        ups = [part.block(leaf) for part, leaf in parts]
        join = partial(block_diagonal, ups, self.a.shape[1], self.width, dtype)
        return (Block(slice(None), slice(None), self._once("b", dtype, join)),)

    def _once(self, name: str, dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
        """Return what `make` returns; with a cache, call it only once for each name and dtype."""
        if self.kept is None:
            return make()
        if (name, dtype) not in self.kept:
            self.kept[name, dtype] = make()
        return self.kept[name, dtype]

    def apart(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Turn the gradients of the blocks into those of the parts' leaves (N, size, rank)."""
        if len(grads) == len(self.parts):
            return tuple(grads)
        return tuple(grads[0][:, part.columns, part.rows] for part in self.parts)


def _up(b: Tensor, dtype: torch.dtype) -> Tensor:
    return b.to(dtype).transpose(1, 2)


class AdapterViews:
    """The adapters of all joined layers, and the parameters that are views of them.

    An adapter None becomes zeros. `joined` maps the module names of each joined layer to its
    adapters; None for a layer without adapters.
    """

    def __init__(
        self,
        layers: Mapping[str, LoraLayer],
        weights: LlamaWeights,
        adapters: Sequence[str | None],
    ) -> None:
        self.adapters = tuple(adapters)
        self._layers = layers
        self.joined: dict[tuple[str, ...], JoinedAdapters | None] = {
            base.names: self._build(base) for layer in weights.layers for base in layer.linears()
        }

    @torch.no_grad()
    def share_storage(self) -> None:
        """Make the adapters' parameters views of the joined tensors."""
        for joined, part, b in self._each():
            views = joined.a.detach()[:, part.rows].unbind(), b.detach().unbind()
            for name, view_a, view_b in zip(self.adapters, *views, strict=True):
                weight_a, weight_b = adapter_weights(self._layers[part.name], str(name))
                weight_a.data, weight_b.data = view_a, view_b

    def drop_kept(self) -> AdapterViews:
        """Drop cached tensors, since the weights may have changed."""
        for joined in self.joined.values():
            if joined is not None and joined.kept is not None:
                joined.kept.clear()
        return self

    def collect_gradients(self, adapters: Sequence[str | None]) -> None:
        """Move the gradients of the joined tensors to the parameters of `adapters`."""
        learning = set(adapters)
        for joined, part, b in self._each():
            if joined.a.grad is None or b.grad is None:
                continue
            layer = self._layers[part.name]
            grads_a = joined.a.grad[:, part.rows].unbind()
            for name, grad_a, grad_b in zip(self.adapters, grads_a, b.grad.unbind(), strict=True):
                if name is None or name not in learning or name not in layer.lora_A:
                    continue
                weight_a, weight_b = adapter_weights(layer, name)
                whole = len(weight_a) == part.rank
                weight_a.grad = grad_a if whole else grad_a[: len(weight_a)]
                weight_b.grad = grad_b if whole else grad_b[:, : len(weight_a)].contiguous()
            b.grad = None
        for joined in self.joined.values():
            if joined is not None:
                joined.a.grad = None

    def _each(self) -> list[tuple[JoinedAdapters, Part, Tensor]]:
        return [
            (joined, part, b)
            for joined in self.joined.values()
            if joined is not None
            for part, b in zip(joined.parts, joined.b, strict=True)
        ]

    @torch.no_grad()
    def _build(self, base: JoinedLinear) -> JoinedAdapters | None:
        parts: list[Part] = []
        pairs: list[list[tuple[Tensor, Tensor] | None]] = []
        row = column = 0
        for name, size in zip(base.names, base.sizes, strict=True):
            layer = self._layers.get(name)
            weights = [
                adapter_weights(layer, a) if layer and a is not None and a in layer.lora_A else None
                for a in self.adapters
            ]
            rank = max((len(pair[0]) for pair in weights if pair is not None), default=0)
            if rank:
                parts.append(Part(name, slice(row, row + rank), slice(column, column + size)))
                pairs.append(weights)
                row += rank
            column += size
        if not parts:
            return None
        like = next(pair for pair in pairs[0] if pair is not None)[0]
        count = len(self.adapters)
        a = like.new_zeros(count, row, like.shape[1])
        b = [
            like.new_zeros(count, part.columns.stop - part.columns.start, part.rank)
            for part in parts
        ]
        scale = like.new_zeros(count, row)
        for part, b_leaf, weights in zip(parts, b, pairs, strict=True):
            for i, (name, pair) in enumerate(zip(self.adapters, weights, strict=True)):
                if pair is not None:
                    rank, scaling = len(pair[0]), self._layers[part.name].scaling[str(name)]
                    a[i, part.rows][:rank] = pair[0]
                    b_leaf[i, :, :rank] = pair[1]
                    scale[i, part.rows][:rank] = scaling
        joined = (a.requires_grad_(), tuple(weights.requires_grad_() for weights in b))
        width = sum(base.sizes)
        limit = KEPT_ELEMENTS if like.device.type == "cpu" else KEPT_DEVICE_ELEMENTS
        cache = {} if count * row * max(width, a.shape[2]) <= limit else None
        return JoinedAdapters(*joined, scale, tuple(parts), width, cache)


def adapter_views(
    slots: AdapterSlots, weights: LlamaWeights, adapters: Sequence[str | None]
) -> AdapterViews:
    """Return stacks that contain `adapters`; if all shapes are equal, parameters become views."""
    trained = tuple(name for name in slots.names if slots.is_trainable(name))
    # Rounding may depend on the other adapters of a batch, so the adapters of a shard have their
    # own leaves: results do not depend on the number of processes.
    joined_names = slots.together or trained
    if set(adapters) <= set(joined_names) <= set(trained):
        views: dict[tuple[str, ...], AdapterViews] = slots.derived.setdefault("adapter_views", {})
        if joined_names not in views and _alike(slots.layers, joined_names):
            for stale in [names for names in views if set(names) & set(joined_names)]:
                del views[stale]  # their parameters become views of other tensors
            new_views = views[joined_names] = AdapterViews(slots.layers, weights, joined_names)
            new_views.share_storage()
        if joined_names in views:
            return views[joined_names].drop_kept()
    return AdapterViews(slots.layers, weights, adapters)


def _alike(layers: Mapping[str, LoraLayer], names: Sequence[str]) -> bool:
    """Return whether the slots `names` adapt the same modules with the same shapes and dtypes."""

    def shape(layer: LoraLayer, name: str) -> tuple[object, ...] | None:
        if name not in layer.lora_A:
            return None
        a, b = adapter_weights(layer, name)
        return a.shape, b.shape, a.dtype, a.device

    return all(len({shape(layer, name) for name in names}) == 1 for layer in layers.values())
