"""Stop strings in a decode loop: between blocks of steps the host looks at what was drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np
import torch

if TYPE_CHECKING:
    from evo_grpo.model.ends import Ends
    from evo_grpo.rollout.native.batch import Batch
    from evo_grpo.rollout.native.output import Output


@final
class StopStrings:
    """Finds the rows of a decode loop whose text has a stop string.

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
