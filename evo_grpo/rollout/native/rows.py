"""The rows of a decode loop, their output, and the conditions that end them.

NP counts the (agent, prompt) rows, each of which becomes G completion rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evo_grpo.model.forward.sending import send
from evo_grpo.model.forward.stacks import RowLayout
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.sampling import RowSampling, key_tensor, uniform


@dataclass
class Rows:
    """The rows that are still decoded, aligned with the rows of the cache.

    `origin` (B,) is the index of each row in the output. `draws` (steps, B) float64 in [0, 1) has
    one draw per token of the longest completion, and one more if other rows wait to be decoded.
    `lengths` (B,) are the prompts' lengths. `seen` (B, V) bool has the tokens of prompt and
    completion so far; None without a penalty. `layout` has the adapters with rows, and the number
    of rows of each.
    """

    origin: Tensor
    draws: Tensor
    lengths: Tensor
    sampling: RowSampling
    seen: Tensor | None
    layout: RowLayout

    def select(self, rows: Tensor) -> Rows:
        """Return the rows at the ascending positions `rows`."""
        before = self.layout
        agents = torch.bucketize(rows.cpu(), torch.tensor(before.counts).cumsum(0), right=True)
        counts = torch.bincount(agents, minlength=len(before.counts)).tolist()
        nonempty = [pair for pair in zip(before.adapters, counts, strict=True) if pair[1]]
        layout = RowLayout(
            tuple(name for name, _ in nonempty), tuple(count for _, count in nonempty)
        )
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

    `ids` (NP, Tp) are the prompts, padded on the right, and `lengths` (NP,) their lengths. `steps`
    is the number of draws per row; `context` bounds prompt plus completion. Returns the rows,
    without `seen`, and (B,) the index of each row's (agent, prompt) row.
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
    """Return a mask (B, 1, 1, columns) bool of the columns that rows attend to.

    `lengths` (B,) are the lengths of the rows' prompts, and `prompt` that of the longest one, after
    which decoded columns begin. The padding between a prompt and the decoded columns is masked.
    """
    column = torch.arange(columns, device=lengths.device)
    return ((column < lengths[:, None]) | (column >= prompt))[:, None, None, :]


class Output:
    """Tokens (C, B) int64 and log-probs (C, B) fp32 of all rows, including those that have ended.

    C is the length of the longest completion; tokens after a row's end are -1.
    """

    def __init__(self, rows: Rows) -> None:
        steps, total = rows.draws.shape
        device = rows.origin.device
        self.tokens = torch.full((steps, total), -1, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(steps, total, dtype=torch.float32, device=device)

    def write(
        self, drawn: Tensor, rows: Rows, tokens: Tensor, logprobs: Tensor, finished: Tensor
    ) -> None:
        """Write a token and a log-prob (B,) per row, at index `drawn` of its completion.

        `drawn` is (1,) or (B,). For a row that is `finished` (B,), the token is -1.
        """
        places = torch.add(rows.origin, drawn, alpha=self.tokens.shape[1])
        self.tokens.view(-1).index_copy_(0, places, tokens.masked_fill(finished, -1))
        self.logprobs.view(-1).index_copy_(0, places, logprobs)


class StopConditions:
    """End tokens and length limits of the rows in the batch.

    `possible` knows from these limits whether a row can have ended, and reads nothing from the
    device.
    """

    def __init__(
        self, sampling: RowSampling, end_ids: Iterable[int], vocabulary: int, device: torch.device
    ) -> None:
        self.tokens = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.tokens[list(end_ids)] = True
        self._least, self._shortest = sampling.least, sampling.shortest

    def possible(self, drawn: int) -> bool:
        """Return whether a row can have ended after `drawn` tokens."""
        return drawn > self._least or drawn >= self._shortest

    def forbidden(self, drawn: Tensor, sampling: RowSampling) -> Tensor | None:
        """Return a mask, bool (1, V) for all rows or (B, V), of tokens that cannot be drawn.

        The rows have drawn `drawn` (1,) or (B,) tokens. None if no row has a minimum length.
        """
        minimum = sampling.minimum
        if minimum is None:
            return None
        # One minimum for all rows needs no mask per row.
        return self.tokens & (drawn < (minimum[:1] if sampling.alike else minimum))[:, None]

    def met(self, drawn: Tensor, tokens: Tensor, sampling: RowSampling) -> Tensor:
        """Return which rows (B,) end with `tokens` (B,), after `drawn` (1,) or (B,) tokens."""
        ended = self.tokens.index_select(0, tokens)
        if sampling.minimum is not None:
            ended = ended & (drawn >= sampling.minimum)
        return ended | (sampling.limit <= drawn + 1)


class Prompts(NamedTuple):
    """The prompts `ids` (NP, Tp) of some rows, padded on the right.

    `lengths` (NP,) exclude padding, `layout` has the number of prompts of each adapter, and
    `source` (B,) is the index of each row's prompt.
    """

    ids: Tensor
    lengths: Tensor
    layout: RowLayout
    source: Tensor


@final
class RowQueue:
    """The rows of a call, of which at most `places` (None for all) are decoded at once.

    Rows wait in the order of prompts, then of agents, so that all agents are at about the same
    prompt. `requests` has one request per agent. The prompts `ids` (NP, Tp) are padded on the
    right, and `lengths` (NP,) are their lengths. `steps` is the length of the longest completion,
    and `columns` that of the longest prompt. Decoders other than `RefillDecoder` decode all rows at
    once.
    """

    def __init__(
        self,
        requests: Sequence[RolloutRequest],
        ids: Tensor,
        lengths: Tensor,
        *,
        places: int | None,
        steps: int,
        vocabulary: int,
        context: int,
    ) -> None:
        total = sum(r.samples * len(r.prompts) for r in requests)
        self.places = None if places is None or places >= total else places
        self.steps, self.columns, self.waiting = steps, ids.shape[1], total
        self._adapters = tuple(r.adapter for r in requests)
        self._prompts = tuple(len(r.prompts) for r in requests)
        # Rows that have ended write past the last token while others that began later go on.
        draws_per_row = steps if self.places is None else steps + 1
        self.rows, self._source = expand_rows(
            requests, lengths, ids, steps=draws_per_row, vocabulary=vocabulary, context=context
        )
        self._ids, self._lengths, self._vocabulary = ids, lengths, vocabulary
        if self.places is not None:
            prompt = [i for r in requests for i in range(len(r.prompts)) for _ in range(r.samples)]
            self._order = np.argsort(np.array(prompt), kind="stable")
            sizes = [r.samples for r in requests for _ in r.prompts]
            self._prompt_of = np.arange(len(sizes)).repeat(sizes)
            self._tokens = np.array([len(p.token_ids) for r in requests for p in r.prompts])

    def take(self, count: int) -> NDArray[np.int64]:
        """Take at most `count` of the waiting rows; return their indices in ascending order."""
        start = len(self._order) - self.waiting
        rows = np.sort(self._order[start : start + count])
        self.waiting -= len(rows)
        return rows

    def begin(self) -> tuple[Prompts, Rows]:
        """Take the next rows, as many as there are places; return their prompts and the rows."""
        if self.places is None:
            self.waiting = 0
            layout = RowLayout(self._adapters, self._prompts)
            return Prompts(self._ids, self._lengths, layout, self._source), self.rows
        rows = self.take(self.places)
        return self.prompts(rows), self.select(rows)

    def select(self, rows: NDArray[np.int64]) -> Rows:
        """Return the rows with the ascending indices `rows`, without `seen`."""
        return self.rows.select(torch.from_numpy(rows).to(self._ids.device))

    def seen(self, prompts: Prompts) -> Tensor | None:
        """Return which tokens, (B, V) bool, each row's prompt has; None if no row has a penalty."""
        if self.rows.sampling.penalty is None:
            return None
        ids, size = prompts.ids, self._vocabulary
        real = torch.arange(ids.shape[1], device=ids.device) < prompts.lengths[:, None]
        marks = torch.zeros(len(ids), size + 1, dtype=torch.bool, device=ids.device)
        marks.scatter_(1, torch.where(real, ids, size), True)
        return marks[:, :-1].index_select(0, prompts.source)

    def prompts(self, rows: NDArray[np.int64]) -> Prompts:
        """Return the prompts of the rows with the indices `rows`, each prompt once."""
        needed, source = np.unique(self._prompt_of[rows], return_inverse=True)
        ends = np.cumsum(self._prompts)
        owners = np.searchsorted(ends, needed, side="right")
        counts = np.bincount(owners, minlength=len(ends)).tolist()
        indices, row_sources = send([needed, source], self._ids.device)
        return Prompts(
            self._ids.index_select(0, indices)[:, : int(self._tokens[needed].max())],
            self._lengths.index_select(0, indices),
            RowLayout(self._adapters, tuple(counts)),
            row_sources,
        )
