"""The output of a decode loop, and the conditions that end its rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from evo_grpo.rollout.native.rows import Rows
from evo_grpo.rollout.sampling import RowSampling


class Output:
    """Tokens and log-probs of all rows, including those that left the batch.

    Attributes:
        tokens: (C, B) int64, C the longest completion; -1 after a row's end.
        logprobs: (C, B) fp32.
    """

    def __init__(self, rows: Rows) -> None:
        steps, total = rows.draws.shape
        device = rows.origin.device
        self.tokens = torch.full((steps, total), -1, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(steps, total, dtype=torch.float32, device=device)

    def write(
        self, drawn: Tensor, rows: Rows, tokens: Tensor, logprobs: Tensor, finished: Tensor
    ) -> None:
        """Write the tokens number `drawn` (1,) or (B,) of the rows that are not finished."""
        places = torch.add(rows.origin, drawn, alpha=self.tokens.shape[1])
        self.tokens.view(-1).index_copy_(0, places, tokens.masked_fill(finished, -1))
        self.logprobs.view(-1).index_copy_(0, places, logprobs)


class StopConditions:
    """End tokens and length limits of the rows in the batch.

    `possible` says what the host knows without a look at the device: with fixed lengths, no row
    ends before the last step.
    """

    def __init__(
        self, sampling: RowSampling, end_ids: Iterable[int], vocabulary: int, device: torch.device
    ) -> None:
        self.tokens = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.tokens[list(end_ids)] = True
        self._least, self._shortest = sampling.least, sampling.shortest

    def possible(self, drawn: int) -> bool:
        """Return whether a row can have ended when so many tokens were drawn."""
        return drawn > self._least or drawn >= self._shortest

    def forbidden(self, drawn: Tensor, sampling: RowSampling) -> Tensor | None:
        """Return the tokens that some rows cannot draw after `drawn` (1,) or (B,) others.

        It is bool (1, V) for all rows or (B, V); None if no row has a least length.
        """
        minimum = sampling.minimum
        if minimum is None:
            return None
        # One minimum for all rows needs no mask per row.
        return self.tokens & (drawn < (minimum[:1] if sampling.alike else minimum))[:, None]

    def met(self, drawn: Tensor, tokens: Tensor, sampling: RowSampling) -> Tensor:
        """Return the rows (B,) that end with `tokens` (B,), drawn after `drawn` (1,) others."""
        ended = self.tokens.index_select(0, tokens)
        if sampling.minimum is not None:
            ended = ended & (drawn >= sampling.minimum)
        return ended | (sampling.limit <= drawn + 1)
