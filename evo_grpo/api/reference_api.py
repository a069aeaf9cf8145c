"""The rest of the reference API's methods: introspection, adapters by role, optimizers, modes.

Each acts on one agent of a cohort and leaves the others as they are.
"""

from __future__ import annotations

import warnings
from abc import ABC
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from evo_grpo.cohort.cohort import Cohort
from evo_grpo.cohort.settings import AgentSettings
from evo_grpo.cohort.state import AgentState
from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.objective.lr_schedule import CosineLRScheduleConfig
from evo_grpo.schema.hparams import Hparams
from evo_grpo.validation import whole

#: What agents of the reference API call their one policy and its optimizer.
POLICY, OPTIMIZER = "actor", "optimizer"


class ReferenceAPI(ABC):
    """Methods that scripts written for the reference API call, apart from the main ones."""

    cohort: Cohort
    slot: int
    index: int
    settings: AgentSettings
    training: bool

    @property
    def state(self) -> AgentState:
        """The agent's own state within the cohort."""
        return self.cohort.check_slot(self.slot)

    @property
    def reference_update_tracker(self) -> int:
        """What `set_reference_policy` was last called with; saved and copied with the reference."""
        return self.state.reference_updates

    def get_policy(self) -> Any:  # noqa: ANN401 -- a PeftModel, which PEFT types loosely
        """Return the PeftModel, with this agent's adapter active."""
        self.use_adapter(POLICY)
        return self.cohort.slots.peft

    def evolvable_attributes(self, networks_only: bool = False) -> dict[str, Any]:
        """Return the policy and, unless `networks_only`, its optimizer."""
        networks = {POLICY: self.get_policy()}
        return networks if networks_only else {**networks, OPTIMIZER: self.state.optimizer}

    @staticmethod
    def inspect_attributes(agent: ReferenceAPI, input_args_only: bool = False) -> dict[str, Any]:
        """Return what the agent is made of, apart from networks and optimizers.

        Args:
            agent: The agent.
            input_args_only: Only the constructor's arguments, with the present hyperparameters.
        """
        skip = {"actor_network", "tokenizer"}
        values = {k: v for k, v in agent.settings.arguments().items() if k not in skip}
        hparams = agent.state.hparams
        values.update({k: getattr(hparams, k) for k in hparams.to_dict()}, index=agent.index)
        if not input_args_only:
            state = agent.state
            values.update(
                slot=agent.slot,
                member=state.member.id,
                steps=state.steps,
                fitness=[score.mean for score in state.history],
                training=agent.training,
                reference_update_tracker=agent.reference_update_tracker,
            )
        return values

    @staticmethod
    def get_state_dim(observation_space: Any) -> tuple[Any, ...]:  # noqa: ANN401 -- any space
        """Return the input size of an observation space; see `space_dim`."""
        return space_dim(observation_space)

    @staticmethod
    def get_action_dim(action_space: Any) -> tuple[Any, ...]:  # noqa: ANN401 -- any space
        """Return the output size of an action space; see `space_dim`."""
        return space_dim(action_space)

    def preprocess_observation(self, observation: Any) -> Any:  # noqa: ANN401 -- returned as it came
        """Return the observation unchanged: prompts are tokenized by the environment."""
        return observation

    def to_device(self, *experiences: Any) -> tuple[Any, ...]:
        """Move tensors, also inside lists, tuples and mappings, to the base model's device."""
        return tuple(_moved(value, self.cohort.base.device) for value in experiences)

    def set_training_mode(self, training: bool) -> None:
        """Choose how `get_action` samples: with the agent's own settings, or plainly at T = 1."""
        self.training = training

    def use_adapter(self, adapter_name: str) -> None:
        """Make a role's adapter the one the PeftModel uses outside the population forward.

        Args:
            adapter_name: "actor", or "reference" where the agent keeps one.

        Raises:
            ConfigError: For any other role.
        """
        self.cohort.slots.activate(self._role(adapter_name))

    @contextmanager
    def select_adapter(self, adapter_name: str) -> Generator[None]:
        """Switch to a role's adapter; the actor is back on exit."""
        self.use_adapter(adapter_name)
        try:
            yield
        finally:
            self.use_adapter(POLICY)

    def set_reference_policy(self, reference_update_tracker: int) -> None:
        """Make the present policy the reference, when the tracker is ahead of the last one seen.

        An agent whose reference was the base, adapters off, keeps a frozen slot from then on: an
        adapter is never merged into the base that all agents share.

        Args:
            reference_update_tracker: Counts, e.g., passes over the data.

        Raises:
            ConfigError: It is no whole number.
        """
        whole().check("reference_update_tracker", reference_update_tracker)
        if reference_update_tracker > self.reference_update_tracker:
            self.cohort.freeze_reference(self.slot)
            self.state.reference_updates = int(reference_update_tracker)

    def reinit_optimizers(self, optimizer: object = None) -> None:
        """Start AdamW afresh, without moments.

        Args:
            optimizer: None, or anything whose `name` is "optimizer", the only one there is.
        """
        name = getattr(optimizer, "name", optimizer)
        if name not in (None, OPTIMIZER):
            raise ConfigError(
                f"reinit_optimizers: expected None or the name {OPTIMIZER!r}, got {name!r}"
            )
        self.state.optimizer = self.cohort.fresh_optimizer(self.slot, self.state.hparams)

    @staticmethod
    def update_lr(
        optimizer: torch.optim.Optimizer,
        lr: float | tuple[float, float],
        accelerator: object = None,
        scheduler_config: CosineLRScheduleConfig | None = None,
    ) -> tuple[None, LambdaLR | None]:
        """Set an optimizer's learning rate.

        Where the optimizer is an agent's, the rate becomes that of its hyperparameters: `learn`
        takes it from its next step on, at the agent's place in its schedule.

        Args:
            optimizer: The optimizer, of an agent (`evolvable_attributes()["optimizer"]`) or any.
            lr: The new rate; a pair is for actor and critic, and GRPO has no critic.
            accelerator: Only None is supported.
            scheduler_config: Build a scheduler from it, for a training loop of one's own; an
                agent's `learn` follows `cosine_lr_schedule_config` of its constructor, with a
                warning here.

        Returns:
            (None, scheduler): the scheduler is None without a config.

        Raises:
            ConfigError: The rate is no finite number > 0.
            EngineUnavailable: For an accelerator.
        """
        if accelerator is not None:
            raise EngineUnavailable("accelerator: not available in this version; pass None")
        if isinstance(lr, tuple):
            raise ConfigError(f"lr: expected one number, GRPO has no critic, got the pair {lr}")
        Hparams(lr=lr)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = lr
        if scheduler_config is None:
            return None, None
        if "agent" in optimizer.param_groups[0]:
            warnings.warn(
                "scheduler_config: learn sets an agent's lr itself, by the "
                "cosine_lr_schedule_config that the agent was built with, so the scheduler "
                "returned here does not reach it; leave scheduler_config out",
                UserWarning,
                stacklevel=2,
            )
        return None, LambdaLR(optimizer, scheduler_config.factor)

    def recompile(self) -> None:
        """Compile the base's layers that carry no adapter, with the mode of `torch_compiler`."""
        self.cohort.base.compile(self.settings.memory.torch_compiler or "default")

    def register_mutation_hook(self, hook: Callable[[], object]) -> None:
        """Call `hook()` after a mutation changed one of this agent's hyperparameters."""
        if not callable(hook):
            raise ConfigError(f"register_mutation_hook: expected a callable, got {hook!r}")
        self.state.hooks.append(hook)

    def register_network_group(self, group: object) -> None:
        """Accept the one group there is; a language-model agent has a single network.

        Raises:
            ConfigError: When the group's evaluation network is not "actor".
        """
        name = getattr(group, "eval_network", group)
        name = getattr(name, "name", name)
        if name != POLICY:
            raise ConfigError(
                f"register_network_group: expected the evaluation network {POLICY!r}, the only "
                f"network of a GRPO agent, got {name!r}"
            )

    def _role(self, name: str) -> str:
        state = self.state
        if name == POLICY:
            return state.adapter
        if name == "reference" and state.has_reference:
            return state.reference
        reasons = {
            "critic": "GRPO has no critic: advantages come from the group",
            "reference": "this agent's reference is the base with adapters off; build it with "
            "use_separate_reference_adapter=True, or call set_reference_policy first",
        }
        raise ConfigError(f"adapter {name!r}: {reasons.get(name, 'expected actor or reference')}")


def space_dim(space: Any) -> tuple[Any, ...]:  # noqa: ANN401 -- any gymnasium space, or TextSpace
    """Return the size of a gymnasium-like space.

    Args:
        space: Box (its shape), Discrete (n,), MultiDiscrete (its sizes, in one row), MultiBinary
            (n,) or its shape, Dict or Tuple (one entry per part), a list of spaces, or a text space
            (its vocabulary).

    Raises:
        ConfigError: For anything else.
    """
    parts = getattr(space, "spaces", space)
    if isinstance(parts, dict):
        return tuple(space_dim(part) for part in parts.values())
    if isinstance(parts, list | tuple):
        return tuple(space_dim(part) for part in parts)
    if hasattr(space, "vocab_size"):
        return (int(space.vocab_size),)
    if hasattr(space, "nvec"):
        return tuple(int(n) for n in np.ravel(space.nvec))
    if hasattr(space, "n"):
        return tuple(int(n) for n in np.ravel(space.n))
    if getattr(space, "shape", None) is not None:
        return tuple(space.shape)
    raise ConfigError(f"space: expected a gymnasium space or a text space, got {space!r}")


def _moved(value: Any, device: torch.device) -> Any:  # noqa: ANN401 -- any nesting of tensors
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {k: _moved(v, device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        parts = [_moved(v, device) for v in value]
        # A named tuple takes its parts one by one.
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
