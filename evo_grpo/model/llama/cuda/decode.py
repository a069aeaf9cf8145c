"""Decoding by kernels: nine launches a layer, whatever numbers of rows and ranks the agents have.

A row's column of the cache is its position, so that a row attends to its first columns and needs
neither a mask nor a column of its own. Prompts are computed by `LlamaDecoder`.
"""

from __future__ import annotations

from copy import copy
from typing import final

import torch
from torch import Tensor, nn

from evo_grpo.model.forward.fused import FusedForward
from evo_grpo.model.llama.cache import FixedCache, Refill
from evo_grpo.model.llama.cuda import operators
from evo_grpo.model.llama.cuda.tables import RowTables, adapted_layers
from evo_grpo.model.llama.decode import LlamaDecoder, stacks_of
from evo_grpo.model.llama.weights import JoinedLayer, LlamaWeights, Norm

#: Columns of the cache come in multiples of this, so that kernels know that rows are aligned.
_COLUMNS = 64


class _Layer:
    """What a layer computes beside its linear layers."""

    def __init__(self, layer: JoinedLayer, following: Norm, table: int, window: int) -> None:
        self.table, self.window = table, window
        self.q_norm = self.k_norm = None
        self.q_eps = self.k_eps = 0.0
        if layer.head_norms:
            (self.q_norm, self.q_eps), (self.k_norm, self.k_eps) = map(_weight, layer.head_norms)
        _, after, then, last = layer.norms
        assert then is not None, "a family of kernels has a norm before the MLP"
        #: Norm of what is added and norm of the sum: of the attention, then of the MLP.
        self.norms = [_norms(after, then), _norms(last, following)]


def _weight(norm: Norm) -> tuple[Tensor, float]:
    return norm.weight.detach(), norm.eps


def _norms(after: Norm | None, following: Norm) -> tuple[Tensor | None, float, Tensor, float]:
    post, post_eps = (None, 0.0) if after is None else _weight(after)
    return post, post_eps, *_weight(following)


@final
class KernelDecoder:
    """One rollout over `LlamaWeights` with the active adapters; see `Decoder`.

    `columns` is the longest prompt plus completion, for the rotary tables.
    """

    def __init__(self, weights: LlamaWeights, fused: FusedForward, columns: int) -> None:
        self.weights = weights
        self.fused = fused
        d = self._described = weights.description
        parts = stacks_of(weights, fused)
        self._prompts = LlamaDecoder(weights, fused, columns, FixedCache(d.scale, d.windows), parts)
        half = d.head_dim // 2
        self._tables = [
            (cos[:, :half].contiguous(), sin[:, half:].contiguous())
            for cos, sin in self._prompts.tables
        ]
        self._linears = adapted_layers(weights, fused, parts)
        self._adapters = fused.layout.adapters
        firsts = [layer.norms[0] for layer in weights.layers[1:]]
        followed = [*firsts, weights.norm]
        self._layers = [
            _Layer(layer, norm or weights.norm, *self._kind(number))
            for number, (layer, norm) in enumerate(zip(weights.layers, followed, strict=True))
        ]
        first = weights.layers[0].norms[0]
        assert first is not None, "a family of kernels has a norm before the attention"
        self._first = _weight(first)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._rows: RowTables | None = None

    @property
    def signature(self) -> object:
        """What decides which kernels a step launches."""
        shapes = [(x.rank, x.a is None, x.bias is None) for layer in self._linears for x in layer]
        dtype = self.weights.dtype
        return str(dtype), tuple(dict.fromkeys(shapes)), self._described

    def rehearse(self) -> None:
        """Run a step of one row over a cache of its own, and draw a token."""
        other, base = self.beside(), self.weights.base
        d, device = self._described, base.device
        shape = 1, d.kv_heads, _COLUMNS, d.head_dim
        cache = torch.zeros(shape, dtype=self.weights.dtype, device=device)
        other._keys = other._values = [cache] * len(self._layers)
        other._rows = RowTables.of((1,), device)
        none = torch.zeros(1, dtype=torch.long, device=device)
        logits = base.head(other.step(none, none))
        heat, scale, cap = torch.ones(1, device=device), base.logit_scale, base.softcap
        ends = torch.zeros(base.vocabulary, dtype=torch.bool, device=device)
        weighed = operators.weigh_blocks(logits, heat, none, None, ends, scale, cap)
        draws = torch.zeros(1, 1, dtype=torch.float64, device=device)
        state = none.clone(), none.bool(), none.clone(), none[None].clone(), heat[None].clone()
        operators.draw_token(
            logits, weighed, heat, None, draws, None, none, ends, none, scale, cap, *state
        )

    def _kind(self, number: int) -> tuple[int, int]:
        """Return the place of a layer's rotary table, -1 for none, and its window, 0 for none."""
        kind = self._described.layers[number]
        table = -1 if kind.table is None else self._described.tables.index(kind.table)
        return table, kind.window or 0

    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Run prompts (NP, Tp); see `Decoder`."""
        return self._prompts.prefill(ids, lengths)

    def expand(self, source: Tensor, columns: int, mask: Tensor) -> None:
        """Expand prompt rows to completion rows; see `Decoder`."""
        del mask  # the padding of a prompt has the columns of the tokens that follow it
        room = -(-columns // _COLUMNS) * _COLUMNS
        self._keys, self._values = [], []
        for come, pieces in zip(self._prefilled(), (self._keys, self._values), strict=True):
            for piece in come:
                new = piece.new_empty(source.shape[0], piece.shape[1], room, piece.shape[3])
                new[:, :, : piece.shape[2]] = piece.index_select(0, source)
                pieces.append(new)
            come.clear()
        self._rows = None

    def keep(self, rows: Tensor) -> None:
        """Drop rows; see `Decoder`."""
        for pieces in (self._keys, self._values):
            for i, piece in enumerate(pieces):
                pieces[i] = piece.index_select(0, rows)
        self._rows = None

    def beside(self) -> KernelDecoder:
        """Return a decoder with an empty cache; see `RefillDecoder`."""
        other = copy(self)
        other._prompts = copy(self._prompts)
        other._prompts.cache = FixedCache(self._described.scale, self._described.windows)
        other._keys, other._values, other._rows = [], [], None
        return other

    def refill(self, arrived: KernelDecoder | None, moves: Refill) -> int:
        """Exchange rows; see `RefillDecoder`."""
        rows = len(moves.stay_to) + len(moves.join_to)
        joining = arrived._prefilled() if arrived else ([], [])
        used = joining[0][0].shape[2] if arrived else 0
        for pieces, come in zip((self._keys, self._values), joining, strict=True):
            for i, piece in enumerate(pieces):
                new = piece.new_empty(rows, *piece.shape[1:])
                new.index_copy_(0, moves.stay_to, piece)
                pieces[i] = new
                if arrived:
                    block = new[:, :, :used]
                    block.index_copy_(0, moves.join_to, come[i].index_select(0, moves.source))
                    come[i] = piece.new_empty(0)  # frees it
        self._rows = None
        # Columns are those of a row itself: what the rows that stay have used counts for no other.
        return used

    def reserve(self, columns: int) -> int | None:
        """Prepare the next steps; see `Decoder`."""
        del columns  # there is room for all
        if self._rows is None:
            counts = self.fused.layout.counts_of(self._adapters)
            self._rows = RowTables.of(counts, self.weights.base.device)
        return self._keys[0].shape[2]

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Run one token per row; see `Decoder`."""
        d, rows = self._described, self._rows
        assert rows is not None
        x, normed = self._embedded(tokens)
        for i, (layer, linears) in enumerate(zip(self._layers, self._linears, strict=True)):
            keys, values = self._keys[i], self._values[i]
            turn = (None, None) if layer.table < 0 else self._tables[layer.table]
            q = x.new_empty(len(x), d.heads, d.head_dim)
            operators.qkv(
                *linears[0].of(normed), rows.tiles, positions, *turn, layer.q_norm, layer.k_norm,
                layer.q_eps, layer.k_eps, q, keys, values,
            )  # fmt: skip
            mixed = operators.attend(q, keys, values, positions, d.scale, layer.window)
            factor = d.residual_multiplier
            x, normed = operators.add_norm(
                *linears[1].of(mixed), rows.owners, x, *layer.norms[0], factor
            )
            inner = operators.gate_up(
                *linears[2].of(normed), rows.tiles, linears[3].weight.shape[1],
                d.activation != "silu",
            )  # fmt: skip
            x, normed = operators.add_norm(
                *linears[3].of(inner), rows.owners, x, *layer.norms[1], factor
            )
        return normed

    def _embedded(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input (B, H) of the first layer, and that normalized."""
        embed, (weight, eps) = self.weights.embed, self._first
        if type(embed) is nn.Embedding:
            factor = self._described.embedding_multiplier
            return operators.embed_norm(tokens, embed.weight, weight, factor, eps)
        x = self.weights.embedded(tokens)
        return x, nn.functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)

    def _prefilled(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return keys and values of the prompts, layer by layer."""
        cache = self._prompts.cache
        assert isinstance(cache, FixedCache)
        return cache.keys, cache.values
