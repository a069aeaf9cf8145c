"""Rows, each a completion or an episode, and their division into minibatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from evo_grpo.learn.objective.shaping import token_advantages
from evo_grpo.schema.hparams import Hparams
from evo_grpo.seeding import generator
from evo_grpo.settings.algorithm import AlgorithmConfig
from evo_grpo.types import Trajectory


@dataclass
class Row:
    """One completion or episode in the learner.

    Attributes:
        token_ids: (T,) int64, prompt and completion, not padded.
        mask: (T,) bool, True where the policy generated the token, also the end token. Position 0
            is never True: nothing predicts it.
        sampler_logprobs: (n,) float32, nats, of the n generated tokens as the rollout engine
            recorded them (see `RolloutEngine`), or None.
        old: (n,) log-probs, nats, under the policy before this learn call; None until computed.
        ref: (n,) log-probs, nats, under the reference; None until computed.
        minibatch: Index, within an epoch, of the optimizer step that uses this row.
        number: Index among the agent's rows of this learn call.
    """

    token_ids: np.ndarray
    mask: np.ndarray
    advantage: float = 0.0
    sampler_logprobs: np.ndarray | None = None
    old: Tensor | None = field(default=None, repr=False)
    ref: Tensor | None = field(default=None, repr=False)
    minibatch: int = 0
    number: int = 0

    @property
    def generated(self) -> int:
        """Number of generated tokens n."""
        return int(self.mask.sum())

    @property
    def first_generated(self) -> int:
        """Position of the first generated token, at least 1; 1 when there is none."""
        return max(1, int(self.mask.argmax()))


@dataclass(frozen=True)
class AgentBatch:
    """The B rows from which the agent in slot `agent` learns in one step, ordered by group.

    `minibatches` is the number of optimizer steps per epoch if the agent's `batch_size` is None.
    """

    agent: int
    rows: list[Row]
    minibatches: int = 1


@dataclass
class AgentTraining:
    """What a learn call needs to train one agent.

    `adapter` names the trained adapter, and `optimizer` has only its parameters. `reference` names
    the adapter of the frozen reference, which agents may share; None is the base without adapter.
    The seed of dropout depends on `stream`, or on `adapter` if `stream` is empty.
    """

    adapter: str
    reference: str | None
    hparams: Hparams
    optimizer: torch.optim.Optimizer
    stream: str = ""


def rows_from_trajectories(
    trajectories: Sequence[Trajectory], advantages: np.ndarray, *, mask_truncated: bool = False
) -> list[Row]:
    """Build rows from one agent's trajectories and their advantages (B,); leave out failed ones.

    `mask_truncated` also leaves out trajectories whose last completion was truncated.
    """
    return [
        Row(
            token_ids=np.asarray(trajectory.token_ids, dtype=np.int64),
            mask=np.asarray(trajectory.mask, dtype=bool),
            advantage=float(advantage),
            sampler_logprobs=None
            if trajectory.logprobs is None
            else np.asarray(trajectory.logprobs, dtype=np.float32),
        )
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
        if not trajectory.error and (trajectory.ended or not mask_truncated)
    ]


@dataclass(frozen=True)
class StepTotals:
    """Numbers of rows and generated tokens (>= 1) in each minibatch of an agent."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def minibatches(self) -> int:
        """Number of minibatches, the optimizer steps of one epoch."""
        return len(self.rows)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> StepTotals:
        """Count the rows and tokens of each minibatch that `assign_minibatches` made."""
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
    """Assign rows to minibatches of `batch_size` in random order; clear `old` and `ref`.

    If the agent's `batch_size` is None, there are `minibatches` of them, of equal size.
    """
    size = hparams.batch_size or -(-len(rows) // minibatches)
    for number, row in enumerate(rows):
        row.old = row.ref = None
        row.minibatch = 0
        row.number = number
    if size >= len(rows):
        return
    order = generator(seed).permutation(len(rows))
    for turn, index in enumerate(order):
        rows[index].minibatch = turn // size


def filter_and_whiten(rows: list[Row], algorithm: AlgorithmConfig) -> list[Row]:
    """Drop some of an agent's rows and whiten the advantages of the rest, as `algorithm` says."""
    if not rows or not (algorithm.filter_zero_adv or algorithm.whiten_advantages):
        return rows
    lengths = torch.tensor([row.generated for row in rows])
    mask = torch.arange(max(1, int(lengths.max()))) < lengths[:, None]
    values, is_kept = token_advantages(
        torch.tensor([row.advantage for row in rows], dtype=torch.float64),
        mask,
        whiten=algorithm.whiten_advantages,
        filter_zero=algorithm.filter_zero_adv,
        filter_eps=algorithm.adv_filter_eps,
    )
    # All tokens of a row still have the same advantage: take that of the first column.
    return [
        replace(row, advantage=float(value))
        for row, value, keep in zip(rows, values[:, 0], is_kept, strict=True)
        if keep
    ]
