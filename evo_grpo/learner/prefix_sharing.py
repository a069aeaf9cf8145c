"""Find rows of a micro-batch with a common prefix, and decide whether sharing it pays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from evo_grpo.model.forward.prefix import SharedPrefix

#: Least share of the padded tokens to save: two spans cost a few operations more than one.
MIN_SAVED_SHARE = 0.05


def find_shared_prefixes(
    positions: npt.NDArray[np.int64],
    ids: npt.NDArray[np.int64],
    masks: npt.NDArray[np.bool_],
    device: torch.device,
) -> SharedPrefix | None:
    """Split rows at their first generated token and find equal prefixes of one agent.

    Args:
        positions: (B,) position of each row's agent, ascending.
        ids: (B, T) padded token ids, T >= 2.
        masks: (B, T), True at generated tokens, never in the first column.
        device: Device of the returned tensors.

    Returns:
        The shared prefixes, or None when they save too little.
    """
    rows, width = ids.shape
    # A row without a generated token has an empty rest: nothing of it is predicted.
    starts = np.where(masks.any(axis=1), masks.argmax(axis=1), 1)
    # Neither the last token nor anything after the last generated one predicts a generated token.
    stops = np.where(masks.any(axis=1), width - 1 - masks[:, ::-1].argmax(axis=1), 1)
    seen: dict[tuple[int, bytes], int] = {}
    source = np.empty(rows, dtype=np.int64)
    for i, (position, start) in enumerate(zip(positions, starts, strict=True)):
        source[i] = seen.setdefault((int(position), ids[i, :start].tobytes()), len(seen))
    first = np.unique(source, return_index=True)[1]
    lengths = starts[first]
    before, after = int(lengths.max()), max(1, int((stops - starts).max()))
    if len(seen) * before + rows * after > (1 - MIN_SAVED_SHARE) * rows * (width - 1):
        return None
    column = np.arange(after)
    follows = np.minimum(starts[:, None] + column, width - 1)
    line, place = np.nonzero(masks)
    begins = place == starts[line]
    where = np.where(
        begins,
        source[line] * before + starts[line] - 1,
        len(seen) * before + line * after + place - 1 - starts[line],
    )
    owners = positions[first]
    return SharedPrefix(
        ids=torch.from_numpy(ids[first, :before].copy()).to(device),
        lengths=tuple(int(n) for n in lengths),
        counts=tuple(int((owners == p).sum()) for p in np.unique(positions)),
        source=torch.from_numpy(source).to(device),
        rest=torch.from_numpy(np.take_along_axis(ids, follows, axis=1)).to(device),
        where=torch.from_numpy(where).to(device),
    )
