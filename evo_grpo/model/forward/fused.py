"""The population forward: each row of a batch goes through its own agent's adapter.

PEFT owns the adapters, but it cannot train a batch that mixes them (`adapter_names` raises in
training mode). So this module replaces the forward of PEFT's LoRA layers inside a context manager,
and puts it back. Rows are sorted by agent. With the agents' A and B stacked to (N, R, in) and
(N, R, out), one pair of batched matmuls adds every agent's update, whatever the number of its rows
(see `evo_grpo.model.forward.chunks`):

    y = x W^T + s_n (x A_n^T) B_n^T        for the rows of agent n

(LoRA, arXiv:2106.09685, eq. 3). A and B stay leaf parameters: `torch.stack` is differentiable, so
autograd hands each agent its own gradient, and no term of the sum reads another agent's rows.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from evo_grpo.errors import ModelError, ShapeError
from evo_grpo.model.forward.chunks import Chunks, make_chunks
from evo_grpo.model.forward.dropout import Dropout, apply_dropout
from evo_grpo.model.forward.layout import RowLayout
from evo_grpo.model.forward.stacks import Stack, build_stack
from evo_grpo.model.probing import by_rows

#: What one chunk's A and B count as, in rows of activations, when rows are cut into chunks.
_RANK = 16
#: Attribute of a LoRA layer that says how it sees rows, as in `probing.LinearInputs`.
INPUT_KIND = "evo_grpo_inputs"


class FusedForward:
    """State that the patched layers read: the current layout, and the stacks.

    Args:
        layers: LoRA layers by module name.
        layout: Rows per agent.
        frozen: True during a rollout: no gradient flows and the weights do not change, so every
            stack is built once and results are added in place; False during learning: stacks are
            built per call, for autograd.
        dropout: LoRA dropout stream, or None for none.
    """

    def __init__(
        self,
        layers: dict[str, LoraLayer],
        layout: RowLayout,
        *,
        frozen: bool,
        dropout: Dropout | None = None,
    ) -> None:
        """Keep the pieces; see the class docstring."""
        self.layers = layers
        self.frozen = frozen
        self.dropout = dropout
        self._stacks: dict[str, Stack] = {}
        self.set_layout(layout)

    def set_layout(self, layout: RowLayout) -> None:
        """Change the rows; adapters may leave, and the stacks that were built shrink with them."""
        previous: RowLayout = getattr(self, "layout", layout)
        if previous.adapters != layout.adapters and self._stacks:
            kept = torch.tensor([previous.adapters.index(name) for name in layout.adapters])
            self._stacks = {name: stack.select(kept) for name, stack in self._stacks.items()}
        self.layout = layout
        self._chunks: dict[int, Chunks] = {}
        wanted = {name for name in layout.adapters if name is not None}
        # A slot may leave out a module that another slot adapts.
        self._served = {
            n for n, layer in self.layers.items() if not wanted.isdisjoint(layer.lora_A)
        }

    def adapts(self, name: str) -> bool:
        """Return whether any adapter of the layout has a part in a layer."""
        return name in self._served

    def stack(self, name: str, dtype: torch.dtype) -> Stack:
        """Return the stacked adapters of a layer, from the cache when they are frozen."""
        if name in self._stacks:
            return self._stacks[name]
        stack = build_stack(self.layers[name], self.layout.adapters, dtype)
        if self.frozen:
            self._stacks[name] = stack
        return stack

    def add(self, x: Tensor, result: Tensor, stack: Stack) -> Tensor:
        """Add every agent's update to its own rows.

        Args:
            x: (B, ..., in) inputs, rows as in the layout.
            result: (B, ..., out) what the base layer made of them; overwritten when frozen.
            stack: The adapters.

        Returns:
            (B, ..., out).
        """
        chunks = self._chunked(x)
        a, b = chunks.per_chunk(stack.a), chunks.per_chunk(stack.b)
        low = torch.bmm(chunks.split(x), a.transpose(1, 2))
        if self.frozen:
            chunks.add_product(result, low, b)
            return result
        if chunks.scatter is None:
            return torch.baddbmm(chunks.split(result), low, b).view(result.shape)
        product = torch.bmm(low, b).view(-1, *result.shape[1:])
        return result + product.index_select(0, chunks.scatter)

    def _chunked(self, x: Tensor) -> Chunks:
        columns = x[0].numel() // x.shape[-1]
        if columns not in self._chunks:
            self._chunks[columns] = make_chunks(self.layout.counts, columns, _RANK, x.device)
        return self._chunks[columns]


def lora_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Return the model's LoRA layers by module name.

    Raises:
        ModelError: When the population forward does not support a layer (an embedding, a
            convolution, DoRA).
    """
    layers = {
        name: m
        for name, m in model.named_modules()
        # A module that only removed adapters had wrapped stays behind as an empty shell.
        if isinstance(m, LoraLayer) and (m.lora_A or m.lora_embedding_A)
    }
    for name, layer in layers.items():
        if (
            not layer.lora_A
            or layer.lora_embedding_A
            or not isinstance(next(iter(layer.lora_A.values())), nn.Linear)
        ):
            raise ModelError(
                f"LoRA on {name!r}: expected a linear layer, got {type(layer).__name__}; "
                "leave embeddings and convolutions out of target_modules"
            )
        if layer.lora_variant:
            raise ModelError(
                f"LoRA on {name!r}: variants such as DoRA are not supported; "
                "set use_dora=False in the LoraConfig"
            )
    return layers


@contextmanager
def population_forward(
    layers: dict[str, LoraLayer],
    layout: RowLayout,
    *,
    frozen: bool = False,
    dropout: Dropout | None = None,
) -> Generator[FusedForward]:
    """Route each row through its own agent's adapter while the context lasts.

    The context must span the backward pass too when gradient checkpointing is on, since that
    recomputes the forward.

    Args:
        layers: From `lora_layers`.
        layout: Rows per agent, in row order.
        frozen: Build every stack once (rollouts); no gradient reaches the adapters then.
        dropout: LoRA dropout stream, or None to switch it off.

    Yields:
        The `FusedForward`, whose layout may be changed as rows leave.
    """
    fused = FusedForward(layers, layout, frozen=frozen, dropout=dropout)
    try:
        for name, layer in layers.items():
            # An attribute of the instance shadows the class's forward; removing it below restores
            # PEFT's own.
            vars(layer)["forward"] = partial(_forward, fused, name, layer)
        yield fused
    finally:
        for layer in layers.values():
            vars(layer).pop("forward", None)


def _forward(
    fused: FusedForward, name: str, layer: LoraLayer, x: Tensor, *args: object, **kwargs: object
) -> Tensor:
    """Replace `LoraLayer.forward`: x (B, ..., in) -> (B, ..., out), rows sorted by agent.

    Layers that see all tokens one after another get x (B * T, in): rows stay in their order.
    """
    result: Tensor = layer.base_layer(x, *args, **kwargs)
    if not fused.adapts(name):
        return result
    layout = fused.layout
    kind = vars(layer).get(INPUT_KIND, "rows")
    shape = result.shape
    if kind == "flat":
        x, result = by_rows(x, layout.rows), by_rows(result, layout.rows)
    elif kind != "rows" or x.shape[0] != layout.rows:
        raise ShapeError(
            f"population forward of {name}: expected B={layout.rows} rows for "
            f"counts={layout.counts}, got x of shape {tuple(x.shape)}; leave the layer out of "
            "lora.target_modules"
        )
    if fused.dropout is not None:
        x = apply_dropout(x, fused.dropout, name, layer, layout)
    return fused.add(x, result, fused.stack(name, x.dtype)).reshape(shape)
