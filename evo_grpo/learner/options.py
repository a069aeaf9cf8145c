"""What the learner is told: one agent's part, and what all agents share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from evo_grpo.objective.losses import LossConfig
from evo_grpo.schema.hparams import Hparams


@dataclass
class Learning:
    """What the learner needs to know of one agent.

    Attributes:
        adapter: Trained slot.
        reference: Slot of its frozen reference, or None for the base with adapters off.
        hparams: Its hyperparameters.
        optimizer: Over the trained slot's parameters alone.
    """

    adapter: str
    reference: str | None
    hparams: Hparams
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class Shaping:
    """What happens to advantages between normalization and the loss; see `token_advantages`.

    Attributes:
        filter_zero: Drop rows with |advantage| <= filter_eps before everything else.
        filter_eps: What counts as none, >= 0.
        whiten: Whiten over an agent's valid tokens.
        use_kl: Shape by the KL per token, in place of the KL penalty.
        clip_range: Clamp to [-clip_range, clip_range], None for no clamp.
    """

    filter_zero: bool = False
    filter_eps: float = 0.0
    whiten: bool = False
    use_kl: bool = False
    clip_range: float | None = None


@dataclass(frozen=True)
class LearnOptions:
    """What all agents of a population share.

    Attributes:
        loss: Loss type and its options; clip_coef and beta in it are overridden per agent.
        token_budget: Padded tokens per micro-batch, None for the base's own number.
        max_rows: Rows per micro-batch, None for no such bound.
        gradient_checkpointing: Recompute activations in the backward pass.
        shaping: What happens to advantages before the loss.
    """

    loss: LossConfig = field(default_factory=LossConfig)
    token_budget: int | None = None
    max_rows: int | None = None
    gradient_checkpointing: bool = False
    shaping: Shaping = field(default_factory=Shaping)
