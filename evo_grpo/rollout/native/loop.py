"""The decode loop: the steps of all rows until each has ended.

A step keeps everything that it changes in tensors on the device and asks nothing of the host, so
that a CUDA graph can hold it. Between blocks of steps the host looks which rows have ended; what
was drawn past a row's end does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

import torch
from torch import Tensor

from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.fused import FusedForward
from evo_grpo.rollout.native.compiled import CompiledStep
from evo_grpo.rollout.native.decoder import Decoder
from evo_grpo.rollout.native.graphs import StepGraphs
from evo_grpo.rollout.native.output import Output, StopConditions
from evo_grpo.rollout.native.rows import Rows
from evo_grpo.rollout.sampling import sample_tokens
from evo_grpo.settings.engines.native import DRAWN_LOGITS

#: Share of the rows at which finished rows are removed; copying the cache costs about one step.
_LEAVE_SHARE = 0.2

#: The same where a step is a graph, which is captured again then; that costs about ten steps.
_LEAVE_SHARE_OF_GRAPHS = 0.5


@final
class DecodeLoop:
    """The rows that are decoded; made after `Decoder.expand`.

    Args:
        base: The base.
        fused: The active population forward.
        decoder: Its cache has the rows.
        rows: The rows.
        prompt_columns: Columns of the longest prompt.
        context: Most tokens of prompt plus completion.
        graphs: Holds steps as CUDA graphs; None for plain steps.
        compiled: Compiles steps that read and write the same memory; None for plain steps.
    """

    def __init__(
        self,
        base: SharedBase,
        fused: FusedForward,
        decoder: Decoder,
        rows: Rows,
        *,
        prompt_columns: int,
        context: int,
        graphs: StepGraphs | None = None,
        compiled: CompiledStep | None = None,
    ) -> None:
        device = rows.origin.device
        self.base = base
        self.fused = fused
        self.decoder = decoder
        self.rows = rows
        self.output = Output(rows)
        self._steps = len(rows.draws)
        self._prompt_columns, self._last = prompt_columns, context - 1
        self._graphs, self._compiled = graphs, compiled
        if graphs is not None:
            graphs.forget()
        self._ends = StopConditions(rows.sampling, base.eos_ids, base.vocabulary, device)
        self._block = block_of(device)
        #: (1,) number of tokens that each row has drawn.
        self._drawn = torch.zeros(1, dtype=torch.long, device=device)
        self._arrange()

    def run(self, logits: Tensor, source: Tensor) -> Output:
        """Decode all rows: row b continues prompt `source[b]`, which ends with `logits[source[b]]`.

        The logits are (NP, V), and the source is (B,).
        """
        self._draw(lambda part: logits.index_select(0, source[part]))
        done = 1
        while done < self._steps:
            if self._ends.possible(done):
                ended = int(self._finished.sum())  # waits for the device
                if ended == len(self._finished):
                    break
                if ended >= self._leave_share * len(self._finished):
                    self._remove_finished()
            count = min(self._block, self._steps - done)
            memory = self.decoder.reserve(self._prompt_columns + done + count - 1)
            step = self._step
            if self._compiled is not None and memory is not None:
                step = partial(self._compiled.run, step)
            if self._graphs is not None and memory is not None:
                self._graphs.run(step, (len(self._tokens), memory), count)
            else:
                for _ in range(count):
                    step()
            done += count
        return self.output

    @property
    def _leave_share(self) -> float:
        graphs = self._graphs is not None and self._graphs.work
        return _LEAVE_SHARE_OF_GRAPHS if graphs else _LEAVE_SHARE

    def _step(self) -> None:
        """Run the last tokens, and draw the next ones."""
        # A finished row that is still in the batch may be at the model's last position.
        positions = (self.rows.lengths + (self._drawn - 1)).clamp_(max=self._last)
        hidden = self.decoder.step(self._tokens, positions)
        self._draw(lambda part: self.base.logits(hidden[part]))

    def _draw(self, logits: Callable[[slice], Tensor]) -> None:
        """Draw a token of each row, from the logits of some rows at a time."""
        rows, drawn = self.rows, self._drawn
        draws = rows.draws.index_select(0, drawn)[0]
        found = [
            sample_tokens(
                logits(part),
                draws[part],
                sampling,
                seen=None if rows.seen is None else rows.seen[part],
                forbidden=self._ends.forbidden(drawn, sampling),
            )
            for part, sampling in self._parts
        ]
        tokens, logprobs = (
            column[0] if len(column) == 1 else torch.cat(column)
            for column in zip(*found, strict=True)
        )
        if rows.seen is not None:
            rows.seen.scatter_(1, tokens[:, None], True)
        self.output.write(drawn, rows, tokens, logprobs, self._finished)
        self._finished.logical_or_(self._ends.met(drawn, tokens, rows.sampling))
        self._tokens.copy_(tokens)
        drawn.add_(1)

    def _remove_finished(self) -> None:
        stay = (~self._finished).nonzero()[:, 0]
        tokens = self._tokens.index_select(0, stay)
        self.rows = self.rows.select(stay)
        self.decoder.keep(stay)
        self._arrange()
        self._tokens.copy_(tokens)

    def _arrange(self) -> None:
        """Make what belongs to the rows, which have changed."""
        rows = self.rows
        self.fused.set_layout(rows.layout)
        self._tokens = torch.zeros_like(rows.origin)
        self._finished = torch.zeros_like(rows.origin, dtype=torch.bool)
        size = max(1, DRAWN_LOGITS // self.base.vocabulary)
        slices = [slice(start, start + size) for start in range(0, len(rows.origin), size)]
        self._parts = [(part, rows.sampling.part(part)) for part in slices]


def block_of(device: torch.device) -> int:
    """Return the steps between two looks of the host, which wait for a device beside it."""
    return 1 if device.type == "cpu" else 8
