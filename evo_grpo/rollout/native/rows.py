"""The rows of a decode loop: expanded from (agent, prompt) rows, removed as completions finish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evo_grpo.rollout.draws import key_tensor
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.requests import row_keys
from evo_grpo.rollout.sampling import RowSampling
from evo_grpo.types import Prompt

#: A request, the position of its first prompt in this piece, and the prompts of this piece.
Piece = tuple[RolloutRequest, int, Sequence[Prompt]]


@dataclass
class Rows:
    """The rows still decoding, aligned with the cache's rows.

    Attributes:
        origin: (B,) index of the row in the output.
        keys: (B,) draw keys.
        lengths: (B,) prompt lengths.
        tokens: (B,) last sampled token.
        sampling: Settings per row.
        mask: (B, 1, 1, columns) bool, columns a row may attend to.
        seen: (B, V) bool or None.
        counts: Rows per adapter of the layout.
    """

    origin: Tensor
    keys: Tensor
    lengths: Tensor
    tokens: Tensor
    sampling: RowSampling
    mask: Tensor
    seen: Tensor | None
    counts: tuple[int, ...]

    def select(self, rows: Tensor) -> Rows:
        """Return the rows at the given positions, which are in ascending order."""
        ends = torch.tensor(self.counts).cumsum(0)
        agents = torch.bucketize(rows.cpu(), ends, right=True)
        counts = torch.bincount(agents, minlength=len(self.counts)).tolist()
        picked = {
            name: None if (value := getattr(self, name)) is None else value.index_select(0, rows)
            for name in ("origin", "keys", "lengths", "tokens", "mask", "seen")
        }
        return replace(self, sampling=self.sampling.select(rows), counts=tuple(counts), **picked)


def expand_rows(
    pieces: Sequence[Piece],
    lengths: Tensor,
    ids: Tensor,
    columns: int,
    *,
    vocabulary: int,
    context: int,
) -> tuple[Rows, Tensor]:
    """Turn (agent, prompt) rows into (agent, prompt, completion) rows.

    Args:
        pieces: One per agent.
        lengths: (NP,) prompt lengths.
        ids: (NP, longest prompt) prompt ids, padded on the right.
        columns: Columns of the cache: longest prompt plus longest completion.
        vocabulary: V.
        context: Longest prompt plus completion of a row.

    Returns:
        The rows, and the (agent, prompt) row each comes from (B,).
    """
    device = lengths.device
    repeats = torch.tensor([r.samples for r, _, ps in pieces for _ in ps])
    source = torch.arange(len(repeats)).repeat_interleave(repeats).to(device)
    keys = [key for r, first, ps in pieces for key in row_keys(r, first, len(ps))]
    counts = tuple(r.samples * len(ps) for r, _, ps in pieces)
    sampling = RowSampling.build([r.sampling for r, _, _ in pieces], counts, vocabulary, device)
    row_lengths = lengths.index_select(0, source)
    sampling = replace(sampling, limit=torch.minimum(sampling.limit, context - row_lengths))
    column = torch.arange(columns, device=device)
    # Decoded columns start behind the longest prompt; a shorter prompt's padding stays hidden.
    mask = (column < row_lengths[:, None]) | (column >= ids.shape[1])
    seen = None
    if sampling.penalty is not None:
        real = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        marks = torch.zeros(len(repeats), vocabulary + 1, dtype=torch.bool, device=device)
        marks.scatter_(1, torch.where(real, ids, vocabulary), True)
        seen = marks[:, :-1].index_select(0, source)
    rows = Rows(
        origin=torch.arange(len(keys), device=device),
        keys=key_tensor(keys, device),
        lengths=row_lengths,
        tokens=torch.zeros(len(keys), dtype=torch.long, device=device),
        sampling=sampling,
        mask=mask[:, None, None, :],
        seen=seen,
        counts=counts,
    )
    return rows, source


def drop_empty(
    adapters: tuple[str | None, ...], counts: tuple[int, ...]
) -> tuple[tuple[str | None, ...], tuple[int, ...]]:
    """Drop agents with no rows left."""
    kept = [(a, c) for a, c in zip(adapters, counts, strict=True) if c]
    return tuple(a for a, _ in kept), tuple(c for _, c in kept)
