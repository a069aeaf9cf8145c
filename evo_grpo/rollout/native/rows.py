"""The rows of a decode loop, one per completion that is not finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evo_grpo.model.forward.layout import RowLayout
from evo_grpo.rollout.draws import key_tensor, uniform
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.sampling import RowSampling


@dataclass
class Rows:
    """The rows that are still decoded, aligned with the rows of the cache.

    Attributes:
        origin: (B,) index of each row in the output.
        draws: (steps, B) float64 in [0, 1), one per token of the longest completion; one more
            where rows wait.
        lengths: (B,) prompt lengths.
        sampling: Sampling settings per row.
        seen: (B, V) bool, tokens of prompt and completion so far; None without a penalty.
        layout: Adapters that have rows, and the number of rows of each.
    """

    origin: Tensor
    draws: Tensor
    lengths: Tensor
    sampling: RowSampling
    seen: Tensor | None
    layout: RowLayout

    def select(self, rows: Tensor) -> Rows:
        """Return the rows at some positions, in ascending order."""
        before = self.layout
        agents = torch.bucketize(rows.cpu(), torch.tensor(before.counts).cumsum(0), right=True)
        counts = torch.bincount(agents, minlength=len(before.counts)).tolist()
        left = [pair for pair in zip(before.adapters, counts, strict=True) if pair[1]]
        layout = RowLayout(tuple(name for name, _ in left), tuple(count for _, count in left))
        return Rows(
            origin=self.origin.index_select(0, rows),
            draws=self.draws.index_select(1, rows),
            lengths=self.lengths.index_select(0, rows),
            sampling=self.sampling.select(rows),
            seen=None if self.seen is None else self.seen.index_select(0, rows),
            layout=layout,
        )


def expand_rows(
    requests: Sequence[RolloutRequest],
    lengths: Tensor,
    ids: Tensor,
    *,
    steps: int,
    vocabulary: int,
    context: int,
) -> tuple[Rows, Tensor]:
    """Expand (agent, prompt) rows to (agent, prompt, completion) rows.

    `lengths` (NP,) are those of the prompts `ids` (NP, longest prompt), padded on the right. Draws
    are made for `steps` tokens of the longest completion; `context` bounds prompt plus completion.

    Returns:
        The rows, without `seen`, and the (agent, prompt) row of each (B,).
    """
    device = lengths.device
    repeats = torch.tensor([r.samples for r in requests for _ in r.prompts])
    source = torch.arange(len(repeats)).repeat_interleave(repeats).to(device)
    keys = [key for r in requests for key in r.row_keys()]
    counts = tuple(r.samples * len(r.prompts) for r in requests)
    sampling = RowSampling.build([r.sampling for r in requests], counts, vocabulary, device)
    row_lengths = lengths.index_select(0, source)
    sampling = replace(
        sampling,
        limit=torch.minimum(sampling.limit, context - row_lengths),
        shortest=min(sampling.shortest, context - ids.shape[1]),
    )
    rows = Rows(
        origin=torch.arange(len(keys), device=device),
        draws=uniform(key_tensor(keys, device), 0, steps),
        lengths=row_lengths,
        sampling=sampling,
        seen=None,
        layout=RowLayout(tuple(r.adapter for r in requests), counts),
    )
    return rows, source


def prompt_mask(lengths: Tensor, prompt: int, columns: int) -> Tensor:
    """Return the columns (B, 1, 1, columns) bool that rows with prompts of `lengths` attend to.

    Decoded columns start after the longest prompt, of `prompt` tokens; the padding of shorter ones
    is masked.
    """
    column = torch.arange(columns, device=lengths.device)
    return ((column < lengths[:, None]) | (column >= prompt))[:, None, None, :]
