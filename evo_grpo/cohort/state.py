"""What a cohort keeps of each agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Member, Score, Slot
from evo_grpo.zero.turns import ZeroOptimizer


@dataclass
class AgentState:
    """One agent: its slot, its optimizer, what it trains with, and its own history.

    Attributes:
        slot: Index within the cohort, >= 0, never reused.
        optimizer: AdamW over its own slot alone. `initial_lr` of its group is torch's name for the
            lr before any schedule, and the one place where an agent's lr is kept. For an agent of
            another rank it is over nothing.
        member: Its lineage since it was last replaced.
        history: The present member's own scores, latest last; the latest `KEPT_SCORES` go on into
            the next round.
        steps: GRPO steps taken by this slot.
        dead_steps: Latest steps in a row in which all its groups had equal rewards.
        collapsed: Why it can no longer learn, as its last round found; empty where it can.
        last: Metrics of the last learn call.
        reference_updates: What `set_reference_policy` was last called with.
        has_reference: Whether it keeps a frozen reference slot; else the base, adapters off.
        hooks: Called after one of its hyperparameters mutated.
        rank: The rank that has its weights and trains it; the others know all else about it.
        shard: Agents of one shard generate and learn in one batch.
    """

    slot: Slot
    _hparams: Hparams
    optimizer: torch.optim.Optimizer
    member: Member
    history: list[Score] = field(default_factory=list[Score])
    steps: int = 0
    dead_steps: int = 0
    collapsed: str = ""
    last: Mapping[str, float] = field(default_factory=dict[str, float])
    reference_updates: int = 0
    has_reference: bool = False
    hooks: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    rank: int = 0
    shard: int = 0

    @property
    def hparams(self) -> Hparams:
        """What it trains with. Its lr is that of the optimizer, which `update_lr` may have set."""
        lr = self.optimizer.param_groups[0]["initial_lr"]
        if lr != self._hparams.lr:
            self._hparams = self._hparams.replace(lr=lr)
        return self._hparams

    @hparams.setter
    def hparams(self, value: Hparams) -> None:
        self._hparams = value
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = value.lr

    @property
    def adapter(self) -> str:
        """Name of the trained adapter."""
        return f"actor_{self.slot}"

    @property
    def reference(self) -> str:
        """Name of the frozen reference adapter, where there is one."""
        return f"reference_{self.slot}"


def inherit(parent: torch.optim.Optimizer, child: torch.optim.Optimizer) -> None:
    """Give a fresh optimizer the moments of another, so that the two share no tensor."""
    if isinstance(parent, ZeroOptimizer) and isinstance(child, ZeroOptimizer):
        child.moments = _cloned(parent.moments)
        return
    state = parent.state_dict()
    child.load_state_dict({**state, "state": _cloned(state["state"])})


def _cloned(value: Any) -> Any:  # noqa: ANN401 -- mappings of mappings of tensors
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(entry) for key, entry in value.items()}  # pyright: ignore[reportUnknownVariableType] -- as above
    return value
