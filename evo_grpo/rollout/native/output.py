"""The output of a decode loop, and the conditions that end its rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evo_grpo.rollout.native.rows import Rows
from evo_grpo.rollout.sampling import RowSampling


class Output:
    """Tokens and log-probs of all rows, including those that left the batch.

    Attributes:
        tokens: (C, B) int64, C the longest completion.
        logprobs: (C, B) fp32.
    """

    def __init__(self, steps: int, rows: Rows) -> None:
        total, device = rows.origin.shape[0], rows.origin.device
        self.tokens = torch.zeros(steps, total, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(steps, total, dtype=torch.float32, device=device)
        self._alive = torch.zeros(steps, total, dtype=torch.bool, device=device)

    def write(
        self, step: int, rows: Rows, tokens: Tensor, logprobs: Tensor, finished: Tensor | None
    ) -> None:
        """Write one step of the rows in the batch; the tokens of finished rows do not count."""
        alive = torch.ones_like(tokens, dtype=torch.bool) if finished is None else ~finished
        whole = tokens.shape[0] == self.tokens.shape[1]
        for table, values in (
            (self.tokens, tokens),
            (self.logprobs, logprobs),
            (self._alive, alive),
        ):
            if whole:
                table[step] = values
            else:
                table[step].index_copy_(0, rows.origin, values)

    def lengths(self) -> Tensor:
        """Return (B,) tokens of each row."""
        return self._alive.sum(0)


class StopConditions:
    """End tokens and length limits of the rows in the batch.

    A condition that no row can meet at a step is not checked, so with fixed lengths the loop never
    waits for the device.
    """

    def __init__(
        self, sampling: RowSampling, eos: Sequence[int], vocabulary: int, device: torch.device
    ) -> None:
        self.sampling = sampling
        self._ids = [torch.tensor(i, device=device) for i in eos]
        self._mask = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._mask[list(eos)] = True
        self._shortest_limit = int(sampling.limit.min())
        minimum = sampling.minimum
        self._least, self._most = (
            (0, 0) if minimum is None else (int(minimum.min()), int(minimum.max()))
        )

    def forbidden(self, step: int) -> Tensor | None:
        """Return the forbidden tokens of a step as bool, (V,) for all rows or (B, V); or None."""
        if self.sampling.minimum is None or step >= self._most:
            return None
        if step < self._least:
            return self._mask
        return self._mask & (step < self.sampling.minimum)[:, None]

    def finished_rows(self, step: int, tokens: Tensor, finished: Tensor | None) -> Tensor | None:
        """Return the rows (B,) bool that are finished after a step; None if none can be."""
        found = [finished] if finished is not None else []
        if step >= self._least:
            found += [tokens == i for i in self._ids]
        if step + 1 >= self._shortest_limit:
            found.append(self.sampling.limit <= step + 1)
        if not found:
            return None
        over = found[0]
        for more in found[1:]:
            over = over | more
        return over
