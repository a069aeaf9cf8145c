"""What the learner needs to know of one agent."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
