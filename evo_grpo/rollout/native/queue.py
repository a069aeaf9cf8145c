"""The rows of a call in the order of decoding: some at once, the others as those end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evo_grpo.model.forward.layout import RowLayout
from evo_grpo.model.forward.sending import send
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native.rows import Rows, expand_rows


class Prompts(NamedTuple):
    """Prompts of some rows.

    Attributes:
        ids: (NP, longest prompt), padded on the right.
        lengths: (NP,).
        layout: Their adapters.
        source: (B,) prompt of each row.
    """

    ids: Tensor
    lengths: Tensor
    layout: RowLayout
    source: Tensor


@final
class RowQueue:
    """The rows of a call, of which at most `places` are decoded at once.

    Rows wait by prompt, then by agent, so that all agents are at about the same prompt.

    Args:
        requests: One per agent, each with prompts.
        ids: (NP, longest prompt) prompt ids, padded on the right.
        lengths: (NP,) prompt lengths.
        places: Most rows at once; None for all. Other decoders than a `RefillDecoder` take all.
        steps: Tokens of the longest completion.

    Attributes:
        rows: All rows.
        places: As given; None if there are no more rows.
        columns: Tokens of the longest prompt.
        steps: Tokens of the longest completion.
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
        drawn = steps if self.places is None else steps + 1
        self.rows, self._source = expand_rows(
            requests, lengths, ids, steps=drawn, vocabulary=vocabulary, context=context
        )
        self._ids, self._lengths, self._vocabulary = ids, lengths, vocabulary
        if self.places is not None:
            prompt = [i for r in requests for i in range(len(r.prompts)) for _ in range(r.samples)]
            self._order = np.argsort(np.array(prompt), kind="stable")
            sizes = [r.samples for r in requests for _ in r.prompts]
            self._prompt_of = np.arange(len(sizes)).repeat(sizes)
            self._tokens = np.array([len(p.token_ids) for r in requests for p in r.prompts])

    def take(self, count: int) -> NDArray[np.int64]:
        """Return the indices of the next rows, at most `count`, in ascending order."""
        first = len(self._order) - self.waiting
        taken = np.sort(self._order[first : first + count])
        self.waiting -= len(taken)
        return taken

    def begin(self) -> tuple[Prompts, Rows]:
        """Return the next rows, as many as there are places, and their prompts."""
        if self.places is None:
            self.waiting = 0
            layout = RowLayout(self._adapters, self._prompts)
            return Prompts(self._ids, self._lengths, layout, self._source), self.rows
        first = self.take(self.places)
        return self.prompts(first), self.select(first)

    def select(self, rows: NDArray[np.int64]) -> Rows:
        """Return some rows, given in ascending order, without `seen`."""
        return self.rows.select(torch.from_numpy(rows).to(self._ids.device))

    def seen(self, prompts: Prompts) -> Tensor | None:
        """Return the tokens (B, V) bool of each row's prompt; None if no row has a penalty."""
        if self.rows.sampling.penalty is None:
            return None
        ids, size = prompts.ids, self._vocabulary
        real = torch.arange(ids.shape[1], device=ids.device) < prompts.lengths[:, None]
        marks = torch.zeros(len(ids), size + 1, dtype=torch.bool, device=ids.device)
        marks.scatter_(1, torch.where(real, ids, size), True)
        return marks[:, :-1].index_select(0, prompts.source)

    def prompts(self, rows: NDArray[np.int64]) -> Prompts:
        """Return the prompts of some rows, each once."""
        needed, source = np.unique(self._prompt_of[rows], return_inverse=True)
        ends = np.cumsum(self._prompts)
        owners = np.searchsorted(ends, needed, side="right")
        counts = np.bincount(owners, minlength=len(ends)).tolist()
        where, to = send([needed, source], self._ids.device)
        return Prompts(
            self._ids.index_select(0, where)[:, : int(self._tokens[needed].max())],
            self._lengths.index_select(0, where),
            RowLayout(self._adapters, tuple(counts)),
            to,
        )
