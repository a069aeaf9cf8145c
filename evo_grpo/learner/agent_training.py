"""One agent as the learner trains it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evo_grpo.schema.hparams import Hparams


@dataclass
class AgentTraining:
    """One agent as the learner trains it.

    Attributes:
        adapter: Trained slot.
        reference: Slot of its frozen reference, or None for the base with adapters off.
        hparams: Its hyperparameters.
        optimizer: Over the parameters of the trained slot and no others.
        stream: Names its stream of dropout; empty for that of the slot's name.
    """

    adapter: str
    reference: str | None
    hparams: Hparams
    optimizer: torch.optim.Optimizer
    stream: str = ""
