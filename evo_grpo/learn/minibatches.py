"""Assign rows to minibatches, and count the denominators of each minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from evo_grpo.learn.objective.shaping import token_advantages
from evo_grpo.learn.rows import Row
from evo_grpo.schema.hparams import Hparams
from evo_grpo.seeding import generator
from evo_grpo.settings.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class StepTotals:
    """Denominators per minibatch of one agent; rows without a gradient count too.

    Attributes:
        rows: Number of rows of each minibatch.
        tokens: Number of generated tokens of each minibatch, at least 1.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def minibatches(self) -> int:
        """Number of minibatches, the optimizer steps of one epoch."""
        return len(self.rows)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> StepTotals:
        """Count rows after `assign_minibatches`."""
        count = max((row.minibatch for row in rows), default=-1) + 1
        return cls(
            tuple(sum(row.minibatch == m for row in rows) for m in range(count)),
            tuple(
                max(1, sum(row.generated for row in rows if row.minibatch == m))
                for m in range(count)
            ),
        )


def assign_minibatches(
    rows: Sequence[Row], hparams: Hparams, seed: int, minibatches: int = 1
) -> None:
    """Assign rows to minibatches of `batch_size` in random order; clear their log-probs.

    Without a `batch_size` there are `minibatches`, of equally many rows.
    """
    size = hparams.batch_size or -(-len(rows) // minibatches)
    for number, row in enumerate(rows):
        row.old = row.ref = None
        row.minibatch = 0
        row.number = number
    if size >= len(rows):
        return
    order = generator(seed).permutation(len(rows))
    for place, index in enumerate(order):
        rows[index].minibatch = place // size


def filter_and_whiten(rows: list[Row], algorithm: AlgorithmConfig) -> list[Row]:
    """Filter one agent's rows and whiten their advantages; filtered rows count in no mean."""
    if not rows or not (algorithm.filter_zero_adv or algorithm.whiten_advantages):
        return rows
    lengths = torch.tensor([row.generated for row in rows])
    mask = torch.arange(max(1, int(lengths.max()))) < lengths[:, None]
    values, kept = token_advantages(
        torch.tensor([row.advantage for row in rows], dtype=torch.float64),
        mask,
        whiten=algorithm.whiten_advantages,
        filter_zero=algorithm.filter_zero_adv,
        filter_eps=algorithm.adv_filter_eps,
    )
    # All tokens of a row still have the same advantage: take that of the first column.
    return [
        replace(row, advantage=float(value))
        for row, value, keep in zip(rows, values[:, 0], kept, strict=True)
        if keep
    ]
