"""Splits rows that share a prefix, so that the prefix is computed once.

The G completions of a prompt are G rows with the same prefix, whose hidden states are equal under
causal attention. The queries of all rows attend to the prefix's keys and values, and the prefix's
gradient is the sum over the rows.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from evo_grpo.model.forward.sending import send

#: Minimum share of padded tokens to save, since two spans cost a few more operations than one.
MIN_SAVED_SHARE = 0.05


@dataclass(frozen=True)
class SharedPrefix:
    """A batch of rows, split into distinct prefixes and the rest of each row.

    Attributes:
        ids: (Q, Tp) int64 distinct prefixes, sorted by agent, padded on the right.
        lengths: Lengths of the prefixes without padding, >= 1.
        counts: Number of prefixes of each agent of the layout.
        source: (B,) index of each row's prefix.
        rest: (B, C) int64 rest of each row, padded on the right.
        row_lengths: (B,) int64 length of each row's prefix, or (1,) if all are equal.
        where: (M,) positions of the wanted hidden states in the Q * Tp tokens of the prefixes
            followed by the B * C tokens of the rests.
        rows: Number of rows of each prefix; empty if they are not consecutive.
        segments: None without `rows`; else int64 arrays: (Q + B + 1,) offsets of all prefixes and
            rests; (Q + 1,) offsets of each prefix's rests; (Q + 1,) offsets of each prefix's real
            tokens; indices of the real tokens in Q * Tp, None if all are real.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    source: Tensor
    rest: Tensor
    row_lengths: Tensor
    where: Tensor
    rows: tuple[int, ...] = ()
    segments: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None


def find_shared_prefixes(
    positions: npt.NDArray[np.int64],
    ids: npt.NDArray[np.int64],
    masks: npt.NDArray[np.bool_],
    device: torch.device,
) -> SharedPrefix | None:
    """Split rows at their first generated token; None if shared prefixes save too little.

    `positions` (B,) are the positions of the rows' agents, ascending; `ids` (B, T) are padded, T >=
    2; `masks` (B, T) are True at generated tokens, never in the first column.
    """
    rows, width = ids.shape
    # A row without a generated token has an empty rest, since none of its tokens is predicted.
    starts = np.where(masks.any(axis=1), masks.argmax(axis=1), 1)
    # Neither the last token nor anything after the last generated one predicts a generated token.
    stops = np.where(masks.any(axis=1), width - 1 - masks[:, ::-1].argmax(axis=1), 1)
    index: dict[tuple[int, bytes], int] = {}
    source = np.empty(rows, dtype=np.int64)
    for i, (position, start) in enumerate(zip(positions, starts, strict=True)):
        source[i] = index.setdefault((int(position), ids[i, :start].tobytes()), len(index))
    first_rows = np.unique(source, return_index=True)[1]
    lengths = starts[first_rows]
    prefix_width, rest_width = int(lengths.max()), max(1, int((stops - starts).max()))
    if len(index) * prefix_width + rows * rest_width > (1 - MIN_SAVED_SHARE) * rows * (width - 1):
        return None
    column = np.arange(rest_width)
    follows = np.minimum(starts[:, None] + column, width - 1)
    row, token = np.nonzero(masks)
    begins = token == starts[row]
    where = np.where(
        begins,
        source[row] * prefix_width + starts[row] - 1,
        len(index) * prefix_width + row * rest_width + token - 1 - starts[row],
    )
    owners = positions[first_rows]
    rest_ids = np.take_along_axis(ids, follows, axis=1)
    row_lengths = lengths[:1] if (lengths == lengths[0]).all() else lengths[source]
    counts = np.bincount(source)
    scattered = bool((np.diff(source) < 0).any())
    tensors = send(
        [ids[first_rows, :prefix_width], source, rest_ids, row_lengths, where]
        + ([] if scattered else _segments(counts, lengths, prefix_width, rest_width)),
        device,
    )
    real_tokens = tensors[8] if len(tensors) > 8 else None
    return SharedPrefix(
        ids=tensors[0],
        lengths=tuple(int(n) for n in lengths),
        counts=tuple(int((owners == p).sum()) for p in np.unique(positions)),
        source=tensors[1],
        rest=tensors[2],
        row_lengths=tensors[3],
        where=tensors[4],
        rows=() if scattered else tuple(counts.tolist()),
        segments=None if scattered else (tensors[5], tensors[6], tensors[7], real_tokens),
    )


def _segments(
    rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], before: int, after: int
) -> list[npt.NDArray[np.int64]]:
    """Return `SharedPrefix.segments`; prefixes are padded to `before`, rests to `after` tokens."""
    count, total = len(rows), int(rows.sum())
    offsets = np.append(np.arange(count) * before, count * before + np.arange(total + 1) * after)
    arrays = [offsets, np.append(0, np.cumsum(rows)) * after, np.append(0, np.cumsum(lengths))]
    if (lengths < before).any():
        arrays.append(np.flatnonzero(np.arange(before) < lengths[:, None]))
    return arrays
