"""What a cohort is told, and what it keeps of each agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from evo_grpo.learner.options import LearnOptions
from evo_grpo.objective.advantages import Scale
from evo_grpo.objective.lr_schedule import CosineLRScheduleConfig
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Member, Score


class Environment(Protocol):
    """What a cohort asks of an environment before it trains in it."""

    tokenizer: Any
    max_output_tokens: int | None

    def limit_context(self, max_context_length: int) -> None:
        """Refuse prompts that leave no room for a completion."""
        ...


#: Longest completion when neither the caller nor an environment says one.
DEFAULT_OUTPUT_TOKENS = 32


@dataclass(frozen=True)
class CohortOptions:
    """Settings all agents share.

    Attributes:
        learn: Loss and memory settings of the learner.
        adv_scale: "group", "batch" or "none"; see `group_advantages`.
        max_output_tokens: Longest completion; None takes the environment's hint, else 32.
        min_output_tokens: The end token cannot come before.
        max_model_len: Longest prompt plus completion, None for the model's own context.
        separate_reference: Keep a frozen reference slot per agent; False takes the base with
            adapters off.
        max_decode_rows: Rows decoded at once.
        max_decode_prompts: Prompts decoded at once, None for no such bound.
        weight_decay: AdamW's, on every adapter.
        lr_schedule: Factor on every agent's lr by its own GRPO steps, None for 1.
    """

    learn: LearnOptions = field(default_factory=LearnOptions)
    adv_scale: Scale = "group"
    max_output_tokens: int | None = None
    min_output_tokens: int = 0
    max_model_len: int | None = None
    separate_reference: bool = False
    max_decode_rows: int = 1024
    max_decode_prompts: int | None = None
    weight_decay: float = 0.0
    lr_schedule: CosineLRScheduleConfig | None = None


@dataclass
class AgentState:
    """One agent: its slot, its optimizer, what it trains with, and its own history.

    Attributes:
        slot: Index within the cohort, >= 0, never reused.
        optimizer: AdamW over its own slot alone. `initial_lr` of its group is torch's name for the
            lr before any schedule, and the one place where an agent's lr is kept.
        member: The life it lives now.
        history: The present member's own scores, latest last.
        steps: GRPO steps taken by this slot.
        last: Metrics of the last learn call.
        reference_updates: What `set_reference_policy` was last called with.
        has_reference: Whether it keeps a frozen reference slot; else the base, adapters off.
        hooks: Called after one of its hyperparameters mutated.
    """

    slot: int
    _hparams: Hparams
    optimizer: torch.optim.Optimizer
    member: Member
    history: list[Score] = field(default_factory=list[Score])
    steps: int = 0
    last: Mapping[str, float] = field(default_factory=dict[str, float])
    reference_updates: int = 0
    has_reference: bool = False
    hooks: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])

    @property
    def hparams(self) -> Hparams:
        """What it trains with. Its lr is that of the optimizer, which `update_lr` may have set."""
        lr = self.optimizer.param_groups[0]["initial_lr"]
        if lr != self._hparams.lr:
            self._hparams = replace(self._hparams, lr=lr)
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


def cloned(state: dict[str, object]) -> dict[str, object]:
    """Copy an optimizer's state dict, so that parent and child share no tensor."""

    def copy(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.clone()
        if isinstance(value, dict):
            return {k: copy(v) for k, v in value.items()}
        return value

    return {"state": copy(state["state"]), "param_groups": state["param_groups"]}
