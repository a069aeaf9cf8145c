"""The rows that are decoded at once, the draw of their next tokens, and their stop strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np
import torch
from torch import Tensor

from evo_grpo.model.base import SharedBase
from evo_grpo.model.ends import Ends
from evo_grpo.model.llama.cuda import operators
from evo_grpo.rollout.native.output import Output, StopConditions
from evo_grpo.rollout.native.rows import Rows
from evo_grpo.rollout.sampling import RowSampling, sample_tokens
from evo_grpo.settings.engines.native import DRAWN_LOGITS

#: Bytes of logits from which kernels draw at once: those of all tensors that count there.
_KERNEL_BYTES = 16 * DRAWN_LOGITS


@final
class Batch:
    """Rows with their last tokens.

    Args:
        rows: The rows.
        drawn: int64, the number of tokens that rows have drawn: (1,) of all rows if they are
            `alike`, else (B,).
        vocabulary: V.
        element: Bytes of a logit.

    Attributes:
        before: (B,) int64, the position before that of each row's first token.
        tokens: (B,) int64, the last ones.
        finished: (B,) bool.
    """

    def __init__(
        self, rows: Rows, drawn: Tensor, vocabulary: int, element: int, *, alike: bool
    ) -> None:
        self.rows, self.drawn, self._alike = rows, drawn, alike
        self.before = rows.lengths - 1
        self.tokens = torch.zeros_like(rows.origin)
        self.finished = torch.zeros_like(rows.origin, dtype=torch.bool)
        self._parts = self._cut(DRAWN_LOGITS // vocabulary)
        self._large_parts = self._cut(_KERNEL_BYTES // (vocabulary * element))

    def _cut(self, size: int) -> list[tuple[slice, RowSampling]]:
        """Return slices of at most so many rows, with their settings."""
        size, rows = max(1, size), self.rows
        slices = [slice(start, start + size) for start in range(0, len(rows.origin), size)]
        return [(part, rows.sampling.part(part)) for part in slices]

    def draw(self, logits: Callable[[slice], Tensor], ends: StopConditions, output: Output) -> None:
        """Draw a token of each row, from the logits of some rows at a time."""
        rows, drawn = self.rows, self.drawn
        draws = (
            rows.draws.index_select(0, drawn) if self._alike else rows.draws.gather(0, drawn[None])
        )[0]
        found = [
            sample_tokens(
                logits(part),
                draws[part],
                sampling,
                seen=None if rows.seen is None else rows.seen[part],
                forbidden=ends.forbidden(drawn if self._alike else drawn[part], sampling),
            )
            for part, sampling in self._parts
        ]
        tokens, logprobs = (
            column[0] if len(column) == 1 else torch.cat(column)
            for column in zip(*found, strict=True)
        )
        if rows.seen is not None:
            rows.seen.scatter_(1, tokens[:, None], True)
        output.write(drawn, rows, tokens, logprobs, self.finished)
        self.finished.logical_or_(ends.met(drawn, tokens, rows.sampling))
        self.tokens.copy_(tokens)
        drawn.add_(1)
        if not self._alike:
            # Rows that have ended stay at the place behind the last token.
            drawn.clamp_(max=len(rows.draws) - 1)

    def draw_by_kernels(
        self, base: SharedBase, hidden: Tensor, ends: StopConditions, output: Output
    ) -> None:
        """Draw a token of each row from final hidden states (B, H), by two kernels; see `draw`.

        It serves sampling without filters and penalties.
        """
        rows, scale, cap = self.rows, base.logit_scale, base.softcap
        for part, sampling in self._large_parts:
            logits: Tensor = base.head(hidden[part])
            drawn, temperature = self.drawn[part], sampling.temperature[:, 0]
            weighed = operators.weigh_blocks(
                logits, temperature, drawn, sampling.minimum, ends.tokens, scale, cap
            )
            operators.draw_token(
                logits, weighed, temperature, sampling.greedy, rows.draws[:, part],
                sampling.minimum, sampling.limit, ends.tokens, rows.origin[part], scale, cap,
                drawn, self.finished[part], self.tokens[part], output.tokens, output.logprobs,
            )  # fmt: skip

    def put(self, other: Batch, places: Tensor) -> None:
        """Copy the state of the rows of another batch to places of this one."""
        self.tokens.index_copy_(0, places, other.tokens)
        self.finished.index_copy_(0, places, other.finished)
        self.drawn.index_copy_(0, places, other.drawn)
        if self.rows.seen is not None and other.rows.seen is not None:
            self.rows.seen.index_copy_(0, places, other.rows.seen)


@final
class StopStrings:
    """Finds the rows of a decode loop whose text has a stop string, between blocks of steps.

    Args:
        ends: Where completions end.
        rows: Rows of the call.

    Attributes:
        lengths: Row -> tokens of its completion, for the rows that a stop string ended.
    """

    def __init__(self, ends: Ends, rows: int) -> None:
        self.lengths: dict[int, int] = {}
        self._ends = ends
        self._read: list[list[int]] = [[] for _ in range(rows)] if ends.strings else []

    def look(self, batch: Batch, output: Output, most: int) -> None:
        """Read the new tokens of a batch, at most `most` of each row, and finish rows that stop."""
        origin = batch.rows.origin
        rows = origin.tolist()
        places = np.array([len(self._read[row]) for row in rows]) + np.arange(most)[:, None]
        inside = places < len(output.tokens)
        where = torch.from_numpy(np.where(inside, places, 0)).to(origin.device)
        values = np.where(inside, output.tokens[where, origin].cpu().numpy(), -1)
        stopped: list[int] = []
        for number, row in enumerate(rows):
            if row in self.lengths:
                continue
            read = self._read[row]
            for token in values[:, number].tolist():
                if token < 0:
                    break
                read.append(token)
                if self._ends.stops(read):
                    self.lengths[row] = len(read)
                    stopped.append(number)
                    break
        if stopped:
            batch.finished[torch.tensor(stopped, device=origin.device)] = True
