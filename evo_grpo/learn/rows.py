"""Rows, each a completion or an episode, and the padded tensors of a micro-batch of rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from evo_grpo.errors import ShapeError
from evo_grpo.model.forward.prefix import SharedPrefix, find_shared_prefixes
from evo_grpo.model.forward.sending import send
from evo_grpo.schema.hparams import Hparams
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
    """An agent in a learn call.

    `adapter` is the trained slot, and `optimizer` has only its parameters. `reference` is the slot
    of the frozen reference, which agents may share, or None for the base. `stream` is added to the
    seed of dropout; if empty, the name of the slot is.
    """

    adapter: str
    reference: str | None
    hparams: Hparams
    optimizer: torch.optim.Optimizer
    stream: str = ""


def rows_from_trajectories(
    trajectories: Sequence[Trajectory], advantages: np.ndarray, *, mask_truncated: bool = False
) -> list[Row]:
    """Return rows from one agent's trajectories and their advantages (B,); omit failed ones.

    `mask_truncated` also omits trajectories whose last completion was truncated.
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
class MicroBatch:
    """Rows of several agents in one forward pass, sorted by agent.

    Attributes:
        owners: Position of each row's agent among the agents of the learn call.
        positions: (B,) `owners` as a tensor on the device.
        counts: Rows per agent of `present`, the positions of the agents that have rows here.
        input_ids: (B, T) int64, padded on the right, without the last token of the longest row.
        targets: (M,) int64 generated token ids, row by row.
        where: (M,) flat positions in (B, T) of the hidden states that predict the targets.
        mask: (B, C) bool, the first n columns of a row with n generated tokens.
        advantages: (B,) fp32.
        prefix: The same rows with each common prefix stored once; None if this would not save work.
    """

    rows: list[Row]
    owners: list[int]
    positions: Tensor
    counts: tuple[int, ...]
    present: tuple[int, ...]
    input_ids: Tensor
    targets: Tensor
    where: Tensor
    mask: Tensor
    advantages: Tensor
    prefix: SharedPrefix | None = None

    def pad(self, flat: Tensor) -> Tensor:
        """Scatter (M,) values to (B, C), zero outside the mask; differentiable."""
        return torch.zeros(self.mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(
            self.mask, flat
        )

    def gather(self, name: str) -> Tensor:
        """Return the per-row tensors `old` or `ref` as (B, C); zeros for rows without it."""
        device = self.mask.device
        parts = [
            torch.zeros(row.generated, device=device)
            if (logprobs := getattr(row, name)) is None
            else logprobs
            for row in self.rows
        ]
        return self.pad(torch.cat(parts))

    def sampler_logprobs(self, old: Tensor) -> Tensor:
        """Return the sampler's log-probs (B, C), nats; `old` in rows that have none recorded."""
        for row in self.rows:
            if row.sampler_logprobs is not None and len(row.sampler_logprobs) != row.generated:
                raise ShapeError(
                    f"sampler_logprobs: expected {row.generated} numbers, one per generated token, "
                    f"got {len(row.sampler_logprobs)}; give one for every True of the row's mask"
                )
        recorded = [(row.sampler_logprobs, row.generated) for row in self.rows]
        flat = np.concatenate(
            [np.zeros(n, np.float32) if logprobs is None else logprobs for logprobs, n in recorded]
        )
        is_recorded = self.mask.new_tensor([[logprobs is not None] for logprobs, _ in recorded])
        return torch.where(is_recorded, self.pad(torch.from_numpy(flat).to(old)), old)

    def scatter(self, name: str, flat: Tensor) -> None:
        """Store (M,) values, detached, in the attribute `old` or `ref` of the rows."""
        parts = flat.detach().split([row.generated for row in self.rows])
        for row, part in zip(self.rows, parts, strict=True):
            setattr(row, name, part)


def collate(bucket: Sequence[tuple[int, Row]], pad_id: int, device: torch.device) -> MicroBatch:
    """Build a micro-batch of (position of its agent, row) pairs, which are sorted by position."""
    rows = [row for _, row in bucket]
    positions = np.asarray([position for position, _ in bucket])
    width = max(2, *(len(row.token_ids) for row in rows))
    ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    masks = np.zeros((len(rows), width), dtype=bool)
    for i, row in enumerate(rows):
        ids[i, : len(row.token_ids)] = row.token_ids
        masks[i, : len(row.token_ids)] = row.mask
    masks[:, 0] = False
    line, column = np.nonzero(masks)
    generated = masks.sum(axis=1)
    compact = np.arange(max(1, int(generated.max()))) < generated[:, None]
    present, counts = np.unique(positions, return_counts=True)
    where = line * (width - 1) + column - 1
    advantages = np.array([row.advantage for row in rows], dtype=np.float32)
    sent = send((positions, ids[:, :-1], ids[line, column], where, compact, advantages), device)
    return MicroBatch(
        rows=rows,
        owners=positions.tolist(),
        positions=sent[0],
        counts=tuple(counts.tolist()),
        present=tuple(present.tolist()),
        input_ids=sent[1],
        targets=sent[2],
        where=sent[3],
        mask=sent[4].bool(),
        advantages=sent[5],
        prefix=find_shared_prefixes(positions, ids, masks, device),
    )
