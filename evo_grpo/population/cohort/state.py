"""Defines the state of an agent; copies it to another agent, to the CPU or to another rank."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from peft import LoraConfig
from torch import Tensor

from evo_grpo.evolve.decide import Standing
from evo_grpo.evolve.start import with_first_choices
from evo_grpo.learn.updates import lr_factor
from evo_grpo.model.forward.sending import fetch
from evo_grpo.model.lora.adapter_files import AdapterCopy
from evo_grpo.model.lora.load import fit_slot, padded
from evo_grpo.model.lora.resize import resize_slot, with_rank
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.population.zero.together import ZeroOptimizer
from evo_grpo.schema.hparams import Hparams, RankAlpha
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.settings.algorithm import LRSchedule
from evo_grpo.types import Member, Score, Slot

START = "start"
"""Name of the slot of the adapter that all agents started from, if there is one."""
COUNTERS = ("steps", "dead_steps", "reference_updates")
"""Fields of `AgentState` that a copy takes over, a checkpoint keeps and all ranks know."""


@dataclass(frozen=True)
class AgentTensors:
    """The tensors of an agent at one moment, copied to the CPU so that training can continue.

    `reference` is None if no reference was copied. `moments` has AdamW's state by parameter
    position; it is empty if no state was copied. For `rank_error` see `AgentState`.
    """

    actor: AdapterCopy
    reference: AdapterCopy | None
    moments: dict[int, dict[str, Tensor]]
    rank_error: float | None


@dataclass
class AgentState:
    """State of one agent: its slot, optimizer, hyperparameters, member and history.

    Attributes:
        slot: Index within the cohort, >= 0, never reused.
        optimizer: AdamW over the agent's slot only, without parameters for an agent of another
            rank. The agent's lr is stored only as `initial_lr` of the parameter group.
        history: Scores of the current member, latest last.
        steps: GRPO steps that the weights have taken, in this slot and in those of its parents.
        dead_steps: Latest steps in a row in which all groups of the agent had equal rewards.
        rank_error: Relative error of B A because its rank or layers were cut before this round;
            None if they were not cut, and in processes without the agent's weights.
        last: Metrics of the last learn call.
        reference_updates: Argument of the last call of `set_reference_policy`.
        has_reference: Whether the agent has its own frozen reference slot.
        hooks: Called after a mutation of one of the hyperparameters.
        rank: The process that has the weights and trains them; all processes have the rest of the
            state.
        shard: Agents of one shard generate and learn in one batch.
    """

    slot: Slot
    _hparams: Hparams
    optimizer: torch.optim.Optimizer
    member: Member
    history: list[Score] = field(default_factory=list[Score])
    steps: int = 0
    dead_steps: int = 0
    rank_error: float | None = None
    last: Mapping[str, float] = field(default_factory=dict[str, float])
    reference_updates: int = 0
    has_reference: bool = False
    hooks: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    rank: int = 0
    shard: int = 0

    @property
    def hparams(self) -> Hparams:
        """The agent's hyperparameters, with the optimizer's lr, which `update_lr` may have set."""
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
    def counters(self) -> dict[str, int]:
        """The values of `COUNTERS` by name; the setter sets missing ones to 0."""
        return {name: getattr(self, name) for name in COUNTERS}

    @counters.setter
    def counters(self, values: Mapping[str, int]) -> None:
        for name in COUNTERS:
            setattr(self, name, int(values.get(name, 0)))

    def lr_factor(self, schedule: LRSchedule | None) -> float:
        """Return the factor by which a schedule multiplies the agent's lr in its next step."""
        if schedule is None:
            return 1.0
        return lr_factor(schedule, self.steps)

    def prepare_step(self, schedule: LRSchedule | None) -> None:
        """Set lr, betas and weight decay of the optimizer for its next step; keep its moments."""
        hparams, factor = self.hparams, self.lr_factor(schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = hparams.lr * factor
            group["weight_decay"] = hparams.weight_decay
            group["betas"] = hparams.adam_betas

    def standing(self) -> Standing:
        """Return the agent's slot, member, hyperparameters and history, for evolution."""
        return Standing(self.slot, self.member, self.hparams, self.history)

    @property
    def adapter(self) -> str:
        """Name of the trained adapter."""
        return f"actor_{self.slot}"

    @property
    def reference(self) -> str:
        """Name of the frozen reference adapter, if there is one."""
        return f"reference_{self.slot}"


@final
class References:
    """The frozen adapters to which the KL term compares the agents of a cohort.

    An agent's reference is its own reference adapter if it has one; otherwise the adapter that all
    agents started from, in the shared slot `START` (if `start` is true); otherwise the base with
    adapters off.
    """

    def __init__(self, slots: AdapterSlots) -> None:
        self.slots = slots
        self.start = False

    def of(self, state: AgentState) -> str | None:
        """Return the slot of an agent's reference, None for the base with adapters off."""
        shared = START if self.start else None
        return state.reference if state.has_reference else shared

    def add_start(self) -> str:
        """Add the slot that is the reference of all agents without their own reference."""
        self.start = True
        self.slots.add(START, trainable=False)
        return START

    def add(self, state: AgentState) -> None:
        """Add the slot of an agent's own reference, with the policy of the base."""
        self.slots.add(state.reference, self.slots.lora_config(state.adapter), trainable=False)


def inherit(parent: torch.optim.Optimizer, child: torch.optim.Optimizer) -> None:
    """Copy the moments of an optimizer into a fresh one, so that the two share no tensor."""
    if isinstance(parent, ZeroOptimizer) and isinstance(child, ZeroOptimizer):
        child.moments = copy.deepcopy(parent.moments)
        return
    child.load_state_dict(copy.deepcopy(parent.state_dict()))


def copy_tensors(
    slots: AdapterSlots, state: AgentState, *, moments: bool, reference: str | None = None
) -> AgentTensors:
    """Copy an agent's tensors, with or without AdamW's moments.

    The copies take 4 bytes per parameter, 12 with moments, 16 with moments and a reference.
    `reference` is a slot to copy for an agent without its own reference.
    """
    reference = state.reference if state.has_reference else reference
    states = state.optimizer.state_dict()["state"] if moments else {}
    values = iter(fetch([value for of_one in states.values() for value in of_one.values()]))
    return AgentTensors(
        slots.snapshot(state.adapter),
        None if reference is None else slots.snapshot(reference),
        {place: {name: next(values) for name in of_one} for place, of_one in states.items()},
        state.rank_error,
    )


def put_tensors(
    slots: AdapterSlots,
    state: AgentState,
    values: AgentTensors,
    fresh_optimizer: Callable[[], torch.optim.Optimizer],
) -> None:
    """Load copied tensors and moments into an agent's slot, and give the slot their LoRA config."""
    for name, adapter in ((state.adapter, values.actor), (state.reference, values.reference)):
        if adapter is not None:
            fit_slot(slots, name, adapter.config)
            slots.put(name, adapter.state)
    state.rank_error = values.rank_error
    state.optimizer = fresh_optimizer()
    if values.moments:
        groups = state.optimizer.state_dict()["param_groups"]
        with torch.no_grad():
            state.optimizer.load_state_dict({"state": values.moments, "param_groups": groups})


def rank_alpha(config: LoraConfig) -> RankAlpha:
    """Return the rank and alpha in a LoRA configuration of PEFT."""
    return RankAlpha(config.r, config.lora_alpha)


def adapter_config(slots: AdapterSlots, hparams: Hparams, adapter: str | None = None) -> LoraConfig:
    """Return the LoRA configuration of an adapter with the rank, alpha and layers in `hparams`.

    Values that `hparams` does not set are those of the slot `adapter`, or, for a new adapter
    (None), those of the run's configuration.
    """
    run, targets = slots.config, hparams.lora_target_modules
    config = run if adapter is None else slots.lora_config(adapter)
    if targets is not None:
        present = None if adapter is None else slots.modules(adapter)
        config = slots.target_sets.adapting(config, targets, present)
    if hparams.lora_r is None and hparams.lora_alpha is None:
        return config
    return with_rank(config, run, hparams.lora_r, hparams.lora_alpha)


def with_choices(hparams: Hparams, space: HyperparameterConfig) -> Hparams:
    """Return `hparams`, in which searched names without a value get their first choice.

    `lora_target_modules` stays unchanged, because it is None for layers that match no named set.
    """
    targets = hparams.lora_target_modules
    return with_first_choices(hparams, space).replace(lora_target_modules=targets)


def resize(
    slots: AdapterSlots,
    state: AgentState,
    hparams: Hparams,
    fresh_optimizer: Callable[[], torch.optim.Optimizer],
) -> None:
    """Give an agent's adapter the rank, alpha and layers of new hyperparameters.

    Moments of added ranks are 0. For reduced ranks and added layers, AdamW starts without moments.
    """
    if (hparams.lora_r, hparams.lora_alpha, hparams.lora_target_modules) == (None, None, None):
        return
    config = adapter_config(slots, hparams, state.adapter)
    if isinstance(state.optimizer, ZeroOptimizer):
        targets = hparams.lora_target_modules
        own = slots.target_sets.modules(targets) if targets else slots.modules(state.adapter)
        state.optimizer.engine.check_holds(config.r, own)
    keys = list(slots.shapes(state.adapter))
    before = {keys[place]: own for place, own in state.optimizer.state_dict()["state"].items()}
    change = resize_slot(slots, state.adapter, config)
    if change is None:
        return
    state.optimizer = fresh_optimizer()
    if change.error is not None and math.isfinite(change.error):
        state.rank_error = change.error
    moments = _resized(before, slots.shapes(state.adapter), change.factors)
    if moments:
        groups = state.optimizer.state_dict()["param_groups"]
        state.optimizer.load_state_dict({"state": moments, "param_groups": groups})


def _resized(
    moments: Mapping[str, Mapping[str, Any]],
    shapes: Mapping[str, torch.Size],
    factors: Mapping[str, float],
) -> dict[int, dict[str, Tensor]]:
    """Return AdamW's moments by parameter position, for parameters that were scaled or grown.

    `moments` are by PEFT's file keys, and so is the factor c by which each parameter was
    multiplied. The gradient with respect to c B is the gradient with respect to B, divided by c.
    """
    resized: dict[int, dict[str, Tensor]] = {}
    for place, (key, shape) in enumerate(shapes.items()):
        if key in moments and key in factors:
            powers = {"exp_avg": factors[key], "exp_avg_sq": factors[key] ** 2}
            resized[place] = dict(moments[key])
            for name, power in powers.items():
                value = moments[key][name]
                resized[place][name] = padded(value, value.new_zeros(shape)) / power
    return resized
