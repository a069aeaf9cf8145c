"""The population forward: each row of a batch goes through its own agent's adapter.

PEFT owns the adapters, but it cannot train a batch that mixes them (`adapter_names` raises in
training mode). So this module replaces the forward of PEFT's LoRA layers inside a context manager.
Rows are sorted by agent. With the agents' A and B stacked to (N, R, in) and (N, R, out), one pair
of batched matmuls adds every agent's update, for any numbers of rows (see
`evo_grpo.model.forward.stacks`):

    y = x W^T + s_n (x A_n^T) B_n^T        for the rows of agent n

(LoRA, arXiv:2106.09685, eq. 3). A and B stay leaf parameters: `torch.stack` is differentiable, so
autograd gives each agent its own gradient, and no term of the sum reads another agent's rows.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from evo_grpo.errors import ShapeError
from evo_grpo.model.forward.stacks import Chunks, RowLayout, Stack, build_stack, make_chunks
from evo_grpo.model.probing import by_rows
from evo_grpo.seeding import derive

#: Cost of the A and B of one chunk, in rows of activations, for the choice of chunks.
_RANK = 16
#: Attribute of a LoRA layer with the layout of its inputs, see `probing.watch_linear_inputs`.
INPUT_KIND = "evo_grpo_inputs"


class FusedForward:
    """The state that the patched layers read: the current layout, and the stacked adapters.

    If `frozen`, as in rollouts, each stack is built once, without gradients; otherwise it is built
    at each call.
    """

    def __init__(
        self,
        layers: dict[str, LoraLayer],
        layout: RowLayout,
        *,
        frozen: bool,
        dropout: Sequence[int] | None = None,
    ) -> None:
        self.layers = layers
        self.frozen = frozen
        self.dropout = dropout
        self._stacks: dict[str, Stack] = {}
        self.set_layout(layout)

    def set_layout(self, layout: RowLayout) -> None:
        """Set the layout of the rows; drop removed adapters from the cached stacks."""
        previous: RowLayout = getattr(self, "layout", layout)
        if previous.adapters != layout.adapters and self._stacks:
            positions = torch.tensor([previous.adapters.index(name) for name in layout.adapters])
            self._stacks = {name: stack.select(positions) for name, stack in self._stacks.items()}
        self.layout = layout
        self._chunks: dict[int, Chunks] = {}
        names = {name for name in layout.adapters if name is not None}
        # A slot may leave out a module that another slot adapts.
        self._served = {n for n, layer in self.layers.items() if not names.isdisjoint(layer.lora_A)}

    def adapts(self, name: str) -> bool:
        """Return whether any adapter of the layout adapts the layer `name`."""
        return name in self._served

    def new_stack(self, name: str, dtype: torch.dtype) -> Stack | None:
        """Build and return the stacked adapters of a layer; None if no agent adapts it."""
        if name not in self._served:
            return None
        return build_stack(self.layers[name], self.layout.adapters, dtype)

    def stack(self, name: str, dtype: torch.dtype) -> Stack:
        """Return the stacked adapters of a layer, from the cache when they are frozen."""
        if name in self._stacks:
            return self._stacks[name]
        stack = build_stack(self.layers[name], self.layout.adapters, dtype)
        if self.frozen:
            self._stacks[name] = stack
        return stack

    def add(self, x: Tensor, result: Tensor, stack: Stack) -> Tensor:
        """Add the update of each row's agent for x (B, ..., in) to `result` (B, ..., out).

        `result` is the output of the base layer; it is overwritten if `frozen`.
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
    """Return the model's LoRA layers by module name; all of them are linear."""
    return {
        name: m
        for name, m in model.named_modules()
        # A module that was wrapped only for removed adapters remains without adapters.
        if isinstance(m, LoraLayer) and m.lora_A
    }


@contextmanager
def population_forward(
    layers: dict[str, LoraLayer],
    layout: RowLayout,
    *,
    frozen: bool = False,
    dropout: Sequence[int] | None = None,
) -> Generator[FusedForward]:
    """Route each row through its own agent's adapter within a `with` block.

    Gradient checkpointing recomputes the forward, so the context must then span the backward too.
    The layout of the yielded `FusedForward` may change as rows are removed. `dropout` has a seed
    for each row; None switches dropout off.
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

    For layers with flattened inputs, x is (B * T, in), in the order of the rows.
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
        x = _drop_out(x, fused.dropout, name, layer, layout)
    return fused.add(x, result, fused.stack(name, x.dtype)).reshape(shape)


def _drop_out(
    x: Tensor, seeds: Sequence[int], name: str, layer: LoraLayer, layout: RowLayout
) -> Tensor:
    """Apply dropout to rows at their adapter's rate; kept values are scaled by 1 / (1 - rate).

    The mask of a row depends only on its seed and the layer, so a recomputed mask is equal.
    """
    parts: list[Tensor] = []
    split = x.split(layout.counts)
    for adapter, rows, agent_x in zip(layout.adapters, layout.slices(), split, strict=True):
        adapted = adapter is not None and adapter in layer.lora_dropout
        module = layer.lora_dropout[str(adapter)] if adapted else None
        rate = module.p if isinstance(module, nn.Dropout) else 0.0
        if rate == 0.0 or rows.start == rows.stop:
            parts.append(agent_x)
            continue
        # Uniform draws fill a row token by token, so a longer padding only appends to them.
        row_numbers = range(rows.start, rows.stop)
        draws = torch.stack([_uniform(x[row].detach(), seeds[row], name) for row in row_numbers])
        parts.append(agent_x * (draws >= rate).to(x.dtype) / (1 - rate))
    return torch.cat(parts)


def _uniform(like: Tensor, seed: int, name: str) -> Tensor:
    # Drawn on the CPU: a device's generator may order its draws by the size of the tensor.
    generator = torch.Generator().manual_seed(derive(seed, name))
    return torch.rand(like.shape, generator=generator).to(like.device)
