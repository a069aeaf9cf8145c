"""The decode loop, which runs steps until all rows have ended.

A step keeps its state in tensors on the device and needs nothing from the host, so that a CUDA
graph can capture it. Between blocks of steps the host finds out which rows have ended, and gives
their places to waiting rows. Tokens drawn past a row's end are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast, final

import numpy as np
import torch
from torch import Tensor

from evo_grpo.model.base import SharedBase
from evo_grpo.model.ends import StopRules
from evo_grpo.model.forward.fused import FusedForward
from evo_grpo.model.forward.sending import send
from evo_grpo.model.llama.cache import Refill
from evo_grpo.model.llama.cuda import operators
from evo_grpo.model.llama.cuda.generate import KernelDecoder
from evo_grpo.rollout.native.decoder import Decoder, RefillDecoder
from evo_grpo.rollout.native.graphs import StepGraphs
from evo_grpo.rollout.native.rows import (
    Output,
    Prompts,
    RowQueue,
    Rows,
    StopConditions,
    prompt_mask,
)
from evo_grpo.rollout.sampling import RowSampling, sample_tokens
from evo_grpo.settings.engines.native import DRAWN_LOGITS, SPARE_COLUMNS

#: Bytes of logits from which kernels draw at once: as many as the four float32 tensors of `draw`.
_KERNEL_BYTES = 16 * DRAWN_LOGITS


@final
class Batch:
    """The rows decoded at once, with their last tokens.

    `drawn` int64 is the number of tokens that rows have drawn: (1,) if it is the same for all rows
    (`alike`), else (B,). `vocabulary` is V, and `element` the bytes of a logit.

    Attributes:
        before: (B,) int64, position of each row's last prompt token.
        tokens: (B,) int64, the last token of each row.
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
        """Return slices of at most `size` rows, with their settings."""
        size, rows = max(1, size), self.rows
        slices = [slice(start, start + size) for start in range(0, len(rows.origin), size)]
        return [(part, rows.sampling.part(part)) for part in slices]

    def draw(self, logits: Callable[[slice], Tensor], ends: StopConditions, output: Output) -> None:
        """Draw a token of each row; `logits` returns the logits of a slice of rows."""
        rows, drawn = self.rows, self.drawn
        draws = (
            rows.draws.index_select(0, drawn) if self._alike else rows.draws.gather(0, drawn[None])
        )[0]
        drawn_parts = [
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
            for column in zip(*drawn_parts, strict=True)
        )
        if rows.seen is not None:
            rows.seen.scatter_(1, tokens[:, None], True)
        output.write(drawn, rows, tokens, logprobs, self.finished)
        self.finished.logical_or_(ends.met(drawn, tokens, rows.sampling))
        self.tokens.copy_(tokens)
        drawn.add_(1)
        if not self._alike:
            # Ended rows keep the position after their last token.
            drawn.clamp_(max=len(rows.draws) - 1)

    def draw_by_kernels(
        self, base: SharedBase, hidden: Tensor, ends: StopConditions, output: Output
    ) -> None:
        """Draw a token of each row from final hidden states (B, H), by two kernels; see `draw`.

        No row may have a filter or a penalty.
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
        """Copy the state of the rows of another batch to the positions `places` of this batch."""
        self.tokens.index_copy_(0, places, other.tokens)
        self.finished.index_copy_(0, places, other.finished)
        self.drawn.index_copy_(0, places, other.drawn)
        if self.rows.seen is not None and other.rows.seen is not None:
            self.rows.seen.index_copy_(0, places, other.rows.seen)


@final
class StopStrings:
    """Finds the rows whose text has a stop string, after each block of decode steps.

    `ends` says where completions end, and `rows` is the number of rows of the call. `lengths` maps
    each row that a stop string ended to the number of its tokens.
    """

    def __init__(self, ends: StopRules, rows: int) -> None:
        self.lengths: dict[int, int] = {}
        self._ends = ends
        self._read: list[list[int]] = [[] for _ in range(rows)] if ends.strings else []

    def look(self, batch: Batch, output: Output, most: int) -> None:
        """Read at most `most` new tokens of each row; mark rows with a stop string as finished."""
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
            tokens = self._read[row]
            for token in values[:, number].tolist():
                if token < 0:
                    break
                tokens.append(token)
                if self._ends.stops(tokens):
                    self.lengths[row] = len(tokens)
                    stopped.append(number)
                    break
        if stopped:
            batch.finished[torch.tensor(stopped, device=origin.device)] = True


#: Share of the rows at which finished rows are removed; copying the cache costs about one step.
_LEAVE_SHARE = 0.2

#: The same where a step is a graph, which is captured again then: that takes as long as two to ten
#: replayed steps.
_LEAVE_SHARE_OF_GRAPHS = 0.5

#: Share of the rows at which finished rows hand their places to rows that wait, which costs two
#: steps, or with a capture up to a dozen replayed ones. Until then, an empty place costs its
#: share of each step.
_REFILL_SHARE, _REFILL_SHARE_OF_GRAPHS = 0.125, 0.25


@final
class DecodeLoop:
    """Decodes the rows of a queue from an empty cache, by CUDA graphs if `graphs` is not None.

    The decoder is a `RefillDecoder` if not all rows are decoded at once.
    """

    def __init__(
        self,
        base: SharedBase,
        fused: FusedForward,
        decoder: Decoder,
        queue: RowQueue,
        *,
        ends: StopRules,
        context: int,
        graphs: StepGraphs | None = None,
    ) -> None:
        self.base = base
        self.fused = fused
        self.decoder = decoder
        self.queue = queue
        self.output = Output(queue.rows)
        self._last = context - 1
        self._graphs = graphs
        device = queue.rows.origin.device
        self._ends = StopConditions(queue.rows.sampling, ends.ids, base.vocabulary, device)
        self.stops, self._watched = StopStrings(ends, len(queue.rows.origin)), bool(ends.strings)
        self._block = block_of(device)
        self._alike = queue.places is None
        self._kernels = isinstance(decoder, KernelDecoder)
        self._columns = queue.columns + queue.steps + (0 if self._alike else SPARE_COLUMNS)
        #: Columns of the cache that are used, and most tokens that a row has left to draw.
        self._used = self._left = 0

    def run(self) -> Output:
        """Decode all rows of the queue, and return their output."""
        queue = self.queue
        self._begin()
        while True:
            if self._watched:
                # A row that joined has its first token beside those of a block.
                self.stops.look(self.batch, self.output, self._block + 1)
            if not self._left and not queue.waiting:
                break
            possible = self._watched or self._ends.possible(queue.steps - self._left)
            if not self._alike or possible:
                rows = len(self.batch.finished)
                ended = int(self.batch.finished.sum())  # waits for the device
                if ended == rows and not queue.waiting:
                    break
                if ended >= self._leave_share * rows:
                    if queue.waiting:
                        if ended < rows:
                            self._refill()
                        else:
                            self.decoder = cast("RefillDecoder", self.decoder).beside()
                            self._begin()
                        continue  # rows may have ended with their first tokens
                    self._remove_finished()
            count = min(self._block, self._left)
            if self._used + count > self._columns:
                self._refill()
            self._run_steps(count)
        return self.output

    def _begin(self) -> None:
        """Prefill the next prompts in an empty cache, and draw the first tokens of their rows."""
        queue = self.queue
        prompts, rows = queue.begin()
        logits = self._prefilled(self.decoder, prompts)
        rows.seen = queue.seen(prompts)
        self._used, self._left = prompts.ids.shape[1], queue.steps - 1
        mask = prompt_mask(rows.lengths, self._used, self._columns)
        self.decoder.expand(prompts.source, self._columns, mask)
        self._go_on(self._begun(rows, logits, prompts.source))

    def _run_steps(self, count: int) -> None:
        memory = self.decoder.reserve(self._used + count)
        if self._graphs is not None and memory is not None:
            self._graphs.run(self._step, (len(self.batch.tokens), memory), count)
        else:
            for _ in range(count):
                self._step()
        self._used += count
        self._left -= count

    def _step(self) -> None:
        """Run the model on the last token of each row, and draw the next token."""
        batch = self.batch
        # A finished row that is still in the batch may be at the model's last position.
        positions = (batch.before + batch.drawn).clamp_(max=self._last)
        hidden = self.decoder.step(batch.tokens, positions)
        if self._kernels and batch.rows.sampling.plain:
            batch.draw_by_kernels(self.base, hidden, self._ends, self.output)
        else:
            batch.draw(lambda part: self.base.logits(hidden[part]), self._ends, self.output)

    @property
    def _leave_share(self) -> float:
        graphs = self._graphs is not None and self._graphs.work
        if self.queue.waiting:
            return _REFILL_SHARE_OF_GRAPHS if graphs else _REFILL_SHARE
        return _LEAVE_SHARE_OF_GRAPHS if graphs else _LEAVE_SHARE

    def _remove_finished(self) -> None:
        old = self.batch
        stay = (~old.finished).nonzero()[:, 0]
        self.decoder.keep(stay)
        drawn = old.drawn.index_select(0, stay) if len(old.drawn) > 1 else old.drawn
        batch = self._batch(old.rows.select(stay), drawn)
        batch.tokens.copy_(old.tokens.index_select(0, stay))
        self._go_on(batch)

    def _refill(self) -> None:
        """Remove the finished rows, give their places to waiting rows, and free columns."""
        queue, places = self.queue, len(self.batch.tokens)
        decoder = cast("RefillDecoder", self.decoder)
        # First, so that joining prompts can use the memory of leaving rows.
        self._remove_finished()
        old = self.batch
        staying = old.rows.origin.cpu().numpy()
        joining = queue.take(places - len(staying))
        indices = np.union1d(staying, joining)
        stay_to, join_to = send(
            [np.searchsorted(indices, staying), np.searchsorted(indices, joining)], self.base.device
        )
        arrived = joined = None
        source = lengths = join_to
        if len(joining):
            arrived, prompts, rows = decoder.beside(), queue.prompts(joining), queue.select(joining)
            logits = self._prefilled(arrived, prompts)
            rows.seen = queue.seen(prompts)
            joined = self._begun(rows, logits, prompts.source)
            source, lengths = prompts.source, rows.lengths
            self._left = queue.steps - 1
        self._used = decoder.refill(arrived, Refill(stay_to, join_to, source, lengths))
        rows = queue.select(indices)
        if old.rows.seen is not None:
            rows.seen = old.rows.seen.new_empty(len(indices), old.rows.seen.shape[1])
        batch = self._undrawn(rows)
        batch.put(old, stay_to)
        if joined is not None:
            batch.put(joined, join_to)
        self._go_on(batch)

    def _prefilled(self, decoder: Decoder, prompts: Prompts) -> Tensor:
        """Run prompts; return the logits (NP, V) of the first token after each prompt."""
        self.fused.set_layout(prompts.layout)
        return self.base.logits(decoder.prefill(prompts.ids, prompts.lengths))

    def _begun(self, rows: Rows, logits: Tensor, source: Tensor) -> Batch:
        """Draw the first tokens of rows; return the batch. Row b continues prompt `source[b]`."""
        batch = self._undrawn(rows)
        batch.draw(lambda part: logits.index_select(0, source[part]), self._ends, self.output)
        return batch

    def _undrawn(self, rows: Rows) -> Batch:
        # Kernels count the tokens of each row apart.
        count = 1 if self._alike and not self._kernels else len(rows.origin)
        return self._batch(rows, torch.zeros(count, dtype=torch.long, device=rows.origin.device))

    def _batch(self, rows: Rows, drawn: Tensor) -> Batch:
        vocabulary, element = self.base.vocabulary, self.base.dtype.itemsize
        return Batch(rows, drawn, vocabulary, element, alike=self._alike and not self._kernels)

    def _go_on(self, batch: Batch) -> None:
        self.batch = batch
        if self._graphs is not None:
            self._graphs.forget()  # it reads the memory of other rows
        self.fused.set_layout(batch.rows.layout)


def refills_rows(device: torch.device) -> bool:
    """Return whether waiting rows take the places of rows that have ended.

    On a CPU the time of a step is proportional to its rows, so the last steps of a call, which have
    few rows, cost little. There, refilling takes 1.15 to 1.19 times as long as decoding one part of
    the rows after another (`experiments/bench/tail.py`).
    """
    return device.type != "cpu"


def block_of(device: torch.device) -> int:
    """Return the number of steps after which the host waits for the device, to find ended rows."""
    return 1 if device.type == "cpu" else 8
