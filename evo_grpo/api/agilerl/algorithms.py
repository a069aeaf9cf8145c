"""GRPO, GSPO and CISPO with the constructors and methods of AgileRL's agents."""

import copy
import warnings
from abc import ABC
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from evo_grpo.api.agent import Agent
from evo_grpo.api.agilerl import arguments
from evo_grpo.api.population import Population
from evo_grpo.api.saved import load_one
from evo_grpo.errors import ConfigError
from evo_grpo.population.zero.engine import stage_of
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.validation import whole
from evo_grpo.settings.keywords import AGENT_KEYWORDS
from evo_grpo.types import Slot

POLICY, OPTIMIZER = "actor", "optimizer"
"""Names of an agent's policy and its optimizer in `evolvable_attributes`."""

_WRAPPER = ("wrapper_cls", "wrapper_kwargs")


class AgileRLAgent(Agent, ABC):
    """An agent with the constructor and the methods that AgileRL documents.

    Args:
        *args: `pad_token_id, pad_token, model_name` and so on, in the order of
            `evo_grpo.api.agilerl.arguments.ARGUMENTS`; or `observation_space, action_space`, which
            are not used.
        **kwargs: The fields of `evo_grpo.api.agilerl.arguments.Arguments`.

    Raises:
        ConfigError: An argument is unknown or has a value out of range.
        ModelError: The base cannot be loaded.
        EngineUnavailable: vLLM is missing, or DeepSpeed if the accelerator uses it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build an agent over a new base; the agents of `population` share a base."""
        given = arguments.Arguments.of(args, kwargs)
        self._build(*given.translated(self.kind), index=given.index)

    @classmethod
    def population(  # pyright: ignore[reportIncompatibleMethodOverride] -- AgileRL's own signature: positions, and size is required
        cls, size: int, *args: Any, **kwargs: Any
    ) -> Population[Any]:
        """Create agents over one base, with equal hyperparameters and initial adapters.

        Args:
            size: N agents, >= 1.
            *args: As for the constructor; `wrapper_cls, wrapper_kwargs` may follow two spaces.
            **kwargs: As for the constructor. `wrapper_cls`, called with each agent and
                `wrapper_kwargs`, makes the elements of the population.

        Returns:
            A sequence of N agents that generate, learn and are tested together.
        """
        whole(1, "it counts agents").check("population: size", size)
        args, keywords = arguments.without_spaces(args, kwargs, then=_WRAPPER)
        wrapper, settings = (keywords.pop(name, None) for name in _WRAPPER)
        given = arguments.Arguments.of(args, keywords)
        agents = cls._build_several(*given.translated(cls.kind), size=int(size), init="same")
        if wrapper is None:
            return Population(agents[0].cohort, agents)
        wrapped = [wrapper(agent, **(settings or {})) for agent in agents]
        return Population(agents[0].cohort, wrapped, [Slot(agent.slot) for agent in agents])

    @property
    def reference_update_tracker(self) -> int:
        """Tracker at the last change of the reference by `set_reference_policy`; saved with it."""
        return self.state.reference_updates

    def clone(self, index: int | None = None, wrap: bool = True) -> Self:
        """Return a copy as `Agent.clone` does; `wrap` has no effect, because nothing is wrapped."""
        del wrap
        return super().clone(index)

    def evolvable_attributes(self, networks_only: bool = False) -> dict[str, Any]:
        """Return the PeftModel with this agent's adapter active, and the agent's optimizer.

        The keys are "actor" and "optimizer". With `networks_only`, the optimizer is left out.
        """
        networks: dict[str, Any] = {POLICY: self.get_policy()}
        return networks if networks_only else {**networks, OPTIMIZER: self.state.optimizer}

    def get_policy(self) -> Any:  # noqa: ANN401 -- a PeftModel, which PEFT types loosely
        """Return the PeftModel, with this agent's adapter active."""
        self.use_adapter(POLICY)
        return self.cohort.slots.peft

    @staticmethod
    def inspect_attributes(agent: Agent, input_args_only: bool = False) -> dict[str, Any]:
        """Return the agent's attributes under AgileRL's names, without networks and optimizers.

        With `input_args_only`, only the constructor's arguments are returned. Their values are the
        present hyperparameters; arguments without effect have their defaults.
        """
        cohort, state, settings = agent.cohort, agent.state, agent.settings
        set_values = agent.hparams.to_dict()
        hparams = {name: v for name, v in agent.hparams if name in set_values}
        values = {name: getattr(arguments.Arguments, name, None) for name in arguments.ARGUMENTS}
        for name, ours in arguments.KEYWORDS.items():
            values[name] = hparams.get(ours, _value_at(settings, AGENT_KEYWORDS[ours]))
        schedule = settings.algorithm.lr_schedule
        vllm = arguments.VLLMConfig.of(settings.engine, settings.algorithm.stop)
        values.update(
            model_config=values["model_config"] or None,
            hp_config=cohort.hp_config or None,
            lora_config=cohort.slots.lora_config(state.adapter),
            cosine_lr_schedule_config=None
            if schedule is None
            else arguments.CosineLRScheduleConfig(schedule.steps, schedule.warmup_proportion),
            loss_type=values["loss_type"] or agent.kind,
            index=agent.index,
            use_vllm=vllm is not None,
            vllm_config=vllm,
            accelerator=cohort.accelerator,
        )
        if cohort.base.padding is not None:
            values.update(pad_token_id=cohort.base.padding[0], pad_token=cohort.base.padding[1])
        for name in ("actor_network", "tokenizer"):
            del values[name]
        if not input_args_only:
            values.update(hparams)
            values.update(
                slot=agent.slot,
                member=state.member.id,
                steps=agent.steps,
                fitness=agent.fitness,
                training=agent.training,
                reference_update_tracker=state.reference_updates,
            )
        return values

    @staticmethod
    def get_state_dim(observation_space: Any) -> tuple[Any, ...]:  # noqa: ANN401 -- any space
        """Return the input size of an observation space; see `_space_dim`."""
        return _space_dim(observation_space)

    @staticmethod
    def get_action_dim(action_space: Any) -> tuple[Any, ...]:  # noqa: ANN401 -- any space
        """Return the output size of an action space; see `_space_dim`."""
        return _space_dim(action_space)

    def preprocess_observation(self, observation: Any) -> Any:  # noqa: ANN401 -- returned unchanged
        """Return the observation unchanged, because the environment tokenizes the prompts."""
        return observation

    def load_checkpoint(  # pyright: ignore[reportIncompatibleMethodOverride] -- AgileRL's positions, with a critic in the fourth
        self,
        path: str | Path,
        load_optimizer: bool = False,
        overwrite_reference_adapter: bool = False,
        overwrite_critic_adapter: bool = True,
        merge_lora_configs: bool = False,
    ) -> None:
        """Load a checkpoint as `Agent.load_checkpoint` does; there is no critic to overwrite."""
        del overwrite_critic_adapter
        super().load_checkpoint(
            path, load_optimizer, overwrite_reference_adapter, merge_lora_configs
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str | torch.device = "cpu",
        accelerator: Any = None,  # noqa: ANN401 -- accelerate is untyped
        *,
        trust_remote_code: bool = False,
    ) -> Self:
        """Build an agent as `Agent.load` does; `accelerator` is as for the constructor."""
        stage = stage_of(accelerator)
        cohort, slot = load_one(
            cls.kind,
            path,
            str(device) if stage is None else accelerator.device.type,
            trust_remote_code=trust_remote_code,
            zero=stage,
            accelerator=None if stage is None else accelerator,
        )
        return cls.on(cohort, slot)

    def use_adapter(self, adapter_name: str) -> None:
        """Activate an adapter of this agent in the PeftModel, for your own calls of the PeftModel.

        `get_action`, `learn` and `test` do not depend on the active adapter.

        Args:
            adapter_name: "actor", or "reference" if the reference is an adapter.
        """
        state = self.state
        adapters = {POLICY: state.adapter, "reference": self.cohort.references.of(state)}
        if (adapter := adapters.get(adapter_name)) is None:
            raise ConfigError(
                f"adapter {adapter_name!r}: expected 'actor', or 'reference' of an agent with "
                "use_separate_reference_adapter=True or after a call of set_reference_policy"
            )
        self.cohort.bring([self.slot])
        self.cohort.slots.activate(adapter)

    @contextmanager
    def select_adapter(self, adapter_name: str) -> Generator[None]:
        """Activate an adapter in a `with` block; the actor is active again afterwards."""
        self.use_adapter(adapter_name)
        try:
            yield
        finally:
            self.use_adapter(POLICY)

    def set_reference_policy(self, reference_update_tracker: int) -> None:
        """Make the present policy the reference if the tracker has grown since the last change.

        An agent whose reference was the base or the common start adapter gets a separate frozen
        reference adapter, because an adapter is never merged into the shared base. The tracker is
        an integer, for example the number of passes over the data.
        """
        whole().check("reference_update_tracker", reference_update_tracker)
        if reference_update_tracker > self.reference_update_tracker:
            self.cohort.freeze_reference(self.slot)
            self.state.reference_updates = int(reference_update_tracker)

    def set_training_mode(self, training: bool) -> None:
        """Set whether `get_action` samples with the agent's own settings or with temperature 1."""
        self.training = training

    def reinit_optimizers(self, optimizer: object = None) -> None:
        """Replace the agent's AdamW by a new one without moments; `optimizer` has no effect."""
        del optimizer
        self.state.optimizer = self.cohort.fresh_optimizer(self.slot, self.hparams)

    @staticmethod
    def update_lr(
        optimizer: torch.optim.Optimizer,
        lr: float,
        accelerator: object = None,
        scheduler_config: arguments.CosineLRScheduleConfig | None = None,
    ) -> tuple[object, LambdaLR | None]:
        """Set an optimizer's learning rate; return `accelerator`, and a scheduler or None.

        For the optimizer of an agent, this also changes the agent's hyperparameter lr. `learn` uses
        the new lr, times the factor of the agent's schedule, from the next step on.

        Args:
            optimizer: Any optimizer, or an agent's optimizer
                (`evolvable_attributes()["optimizer"]`).
            lr: The new rate, > 0.
            accelerator: Returned unchanged.
            scheduler_config: Configuration of the returned scheduler, for your own training loop;
                `learn` follows only the `cosine_lr_schedule_config` of the agent's constructor.
        """
        rate = Hparams(lr=lr).lr
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = rate
        if scheduler_config is None:
            return accelerator, None
        if "agent" in optimizer.param_groups[0]:
            warnings.warn(
                "scheduler_config: learn sets an agent's lr itself, by the "
                "cosine_lr_schedule_config that the agent was built with, so the scheduler "
                "returned here does not reach it; leave scheduler_config out",
                UserWarning,
                stacklevel=2,
            )
        return accelerator, LambdaLR(optimizer, scheduler_config.factor)

    def register_mutation_hook(self, hook: Callable[[], object]) -> None:
        """Register a function to be called after a mutation of this agent's hyperparameters."""
        self.state.hooks.append(hook)

    def register_network_group(self, group: object) -> None:
        """Do nothing: the only network of an agent is "actor"."""
        del group

    def to_device(self, *experiences: Any) -> tuple[Any, ...]:
        """Move tensors, including those in lists, tuples and mappings, to the base's device."""
        return tuple(_moved(value, self.cohort.base.device) for value in experiences)

    def recompile(self) -> None:
        """Do nothing: the base is not compiled."""


@final
class GRPO(AgileRLAgent):
    """Group Relative Policy Optimization (Shao et al. 2024, arXiv:2402.03300)."""

    kind = "grpo"


@final
class GSPO(AgileRLAgent):
    """Group Sequence Policy Optimization, with a ratio per sequence (arXiv:2507.18071)."""

    kind = "gspo"


@final
class CISPO(AgileRLAgent):
    """CISPO: clips importance-sampling weights, not updates (MiniMax 2025, arXiv:2506.13585)."""

    kind = "cispo"


def _value_at(settings: Any, path: tuple[str | int, ...]) -> Any:  # noqa: ANN401 -- of any setting
    for part in path:
        settings = getattr(settings, str(part), None)
    return settings


def _moved(value: Any, device: torch.device) -> Any:  # noqa: ANN401 -- any nesting of tensors
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        copied: Any = copy.copy(value)  # keeps a subclass, such as an observation of a turn
        copied.update({k: _moved(v, device) for k, v in value.items()})
        return copied
    if isinstance(value, list | tuple):
        parts = [_moved(v, device) for v in value]
        # The constructor of a named tuple takes its elements as arguments.
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _space_dim(space: Any) -> tuple[Any, ...]:  # noqa: ANN401 -- any gymnasium space, or TextSpace
    """Return the size of a gymnasium-like space: its shape, or (n,) for a Discrete space.

    The size of a Dict, a Tuple or a list of spaces has an entry for each of them. The size of a
    text space is (vocabulary size,).
    """
    parts = getattr(space, "spaces", space)
    if isinstance(parts, dict | list | tuple):
        return tuple(_space_dim(part) for part in getattr(parts, "values", lambda: parts)())
    for name in ("vocab_size", "nvec", "n"):
        if hasattr(space, name):
            return tuple(int(n) for n in np.ravel(getattr(space, name)))
    return tuple(space.shape)
