"""Rows that share a prefix, which is computed once.

The G completions of a prompt are G rows with one beginning. Causal attention makes its hidden
states the same in each of them, so one copy serves all: their queries attend to its keys and
values, and its gradient is the sum of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SharedPrefix:
    """Rows cut into distinct beginnings and the rest of each row.

    Attributes:
        ids: (Q, Tp) int64 distinct beginnings, sorted by agent, padded on the right.
        lengths: Their real lengths, >= 1.
        counts: Beginnings per agent of the layout.
        source: (B,) beginning of each row.
        rest: (B, C) int64 what follows in each row, padded on the right.
        where: (M,) positions of the wanted hidden states, in the Q * Tp of the beginnings and then
            the B * C of the rest.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    source: Tensor
    rest: Tensor
    where: Tensor

    def lengths_of_rows(self, device: torch.device) -> Tensor:
        """Return the length of every row's beginning (B,), or (1,) where all have one length."""
        if len(set(self.lengths)) == 1:
            return torch.tensor(self.lengths[:1], device=device)
        return torch.tensor(self.lengths, device=device).index_select(0, self.source)
