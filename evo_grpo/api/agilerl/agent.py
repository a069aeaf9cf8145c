"""GRPO, GSPO and CISPO with AgileRL's positions, defaults and extra parameters."""

from __future__ import annotations

import warnings
from abc import ABC
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from evo_grpo.api.agent import OPTIMIZER, POLICY, Agent
from evo_grpo.api.agilerl.arguments import ARGUMENTS, KEYWORDS, Arguments, by_name
from evo_grpo.api.agilerl.checks import check_accelerator, check_critic, is_keywords, refuse_extra
from evo_grpo.api.agilerl.configs import CosineLRScheduleConfig, VLLMConfig
from evo_grpo.api.population import Population
from evo_grpo.api.saved import load_one
from evo_grpo.api.tensors import Observation
from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv, TokenObservationWrapper
from evo_grpo.envs.protocol import Environment
from evo_grpo.errors import ConfigError
from evo_grpo.model.base import SharedBase
from evo_grpo.schema.validation import whole
from evo_grpo.settings.keywords import AGENT_KEYWORDS
from evo_grpo.types import Slot

_WRAPPER = ("wrapper_cls", "wrapper_kwargs")


class AgileRLAgent(Agent, ABC):
    """An agent with the constructor and the methods of AgileRL's pages.

    Args:
        *args: `pad_token_id, pad_token, model_name` and so on, in the order of
            `evo_grpo.api.agilerl.arguments.POSITIONS`; or `observation_space, action_space`, which
            are recognized by their types and not used.
        **kwargs: The fields of `evo_grpo.api.agilerl.arguments.Arguments`.

    Raises:
        ConfigError: An argument is unknown, given twice, or has a value out of range.
        ModelError: The base cannot be loaded.
        EngineUnavailable: For vLLM, or an accelerator with DeepSpeed, where that is missing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build an agent over its own base; the agents of `population` share one."""
        given = Arguments.of(args, kwargs)
        self._build(*given.translated(self.kind), index=given.index)
        _warn_of_other_padding(self.cohort.base)

    @classmethod
    def population(  # pyright: ignore[reportIncompatibleMethodOverride] -- AgileRL's own signature: positions, and size is required
        cls, size: int, *args: Any, **kwargs: Any
    ) -> Population[Any]:
        """Create agents over one base, with equal hyperparameters and initial adapters.

        Args:
            size: N agents, >= 1.
            *args: As for the constructor; two spaces may be followed by `wrapper_cls` and
                `wrapper_kwargs`.
            **kwargs: As for the constructor; and `wrapper_cls`, which is called with each agent and
                `wrapper_kwargs`, and whose results are the members of the population.

        Returns:
            A sequence of N agents that generate, learn and are tested together.

        Raises:
            ConfigError: As for the constructor; or `index`, which belongs to one agent.
        """
        whole(1, "it counts agents").check("population: size", size)
        given = by_name(args, kwargs, after_spaces=_WRAPPER)
        wrapper, settings = given.pop(_WRAPPER[0], None), given.pop(_WRAPPER[1], None)
        _check_wrapper(wrapper, settings)
        if "index" in given:
            raise ConfigError(
                "index: expected none for a population, whose agents are numbered from 0, got "
                f"{given['index']!r}; leave it out, or assign agent.index afterwards"
            )
        arguments = Arguments.of((), given)
        agents = cls._build_several(*arguments.translated(cls.kind), size=int(size), init="same")
        _warn_of_other_padding(agents[0].cohort.base)
        if wrapper is None:
            return Population(agents[0].cohort, agents)
        wrapped = [wrapper(agent, **(settings or {})) for agent in agents]
        return Population(agents[0].cohort, wrapped, [Slot(agent.slot) for agent in agents])

    def clone(self, index: int | None = None, wrap: bool = True) -> Self:
        """Return a new agent over the same base with equal weights, moments and hyperparameters.

        Args:
            index: The clone's index; None takes the index of this agent.
            wrap: No effect: nothing is wrapped here.
        """
        del wrap
        return super().clone(index)

    def get_policy(self) -> Any:  # noqa: ANN401 -- a PeftModel, which PEFT types loosely
        """Return the PeftModel, with this agent's adapter active."""
        return self.evolvable_attributes(networks_only=True)[POLICY]

    @staticmethod
    def inspect_attributes(agent: Agent, input_args_only: bool = False) -> dict[str, Any]:
        """Return the agent's attributes under AgileRL's names, without networks and optimizers.

        Args:
            agent: The agent.
            input_args_only: Return only the constructor's arguments, with the current
                hyperparameters; arguments without effect have their defaults.
        """
        own = Agent.inspect_attributes(agent)
        cohort, state = agent.cohort, agent.state
        values = {name: getattr(Arguments(), name) for name in ARGUMENTS}
        values.update({name: own[ours] for name, ours in KEYWORDS.items()})
        schedule = agent.settings.algorithm.lr_schedule
        values.update(
            model_config=own["config"] or None,
            hp_config=cohort.hp_config or None,
            lora_config=cohort.slots.lora_config(state.adapter),
            cosine_lr_schedule_config=None
            if schedule is None
            else CosineLRScheduleConfig(schedule.steps, schedule.warmup_proportion),
            loss_type=own["loss_type"] or agent.kind,
            index=agent.index,
            use_vllm=(vllm := VLLMConfig.of(agent.settings.engine)) is not None,
            vllm_config=vllm,
            accelerator=cohort.accelerator,
        )
        if cohort.base.padding is not None:
            values.update(pad_token_id=cohort.base.padding[0], pad_token=cohort.base.padding[1])
        for name in ("actor_network", "tokenizer"):
            del values[name]
        if not input_args_only:
            values.update({k: v for k, v in own.items() if k not in AGENT_KEYWORDS})
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
        """Return the observation unchanged: prompts are tokenized by the environment."""
        return observation

    def get_action(
        self,
        obs: Observation | Sequence[Observation],
        training: bool = True,
        repeat_prompts: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Sample completions; see `Agent.get_action`.

        Args:
            obs: Prompts: `Prompt`, strings, or mappings with `input_ids`.
            training: True samples with the agent's own settings.
            repeat_prompts: True samples group_size completions per prompt in training, else one.
            *args: Refused; AgileRL's signature accepts and ignores them.
            **kwargs: As `*args`.
        """
        refuse_extra("get_action", args, kwargs)
        return super().get_action(obs, training, repeat_prompts)

    def test(
        self,
        env: Environment[Any] | TokenObservationWrapper | MultiTurnEnv | str,
        loop: int = 1,
        *args: Any,
        **kwargs: Any,
    ) -> np.ndarray:
        """Evaluate on the test split; see `Agent.test`.

        Args:
            env: The environment, or a task's name.
            loop: Repetitions, with new draws each, >= 1.
            *args: Refused; AgileRL's signature accepts and ignores them.
            **kwargs: As `*args`.
        """
        refuse_extra("test", args, kwargs)
        return super().test(env, loop)

    def load_checkpoint(  # pyright: ignore[reportIncompatibleMethodOverride] -- AgileRL's positions, with a critic in the fourth
        self,
        path: str | Path,
        load_optimizer: bool = False,
        overwrite_reference_adapter: bool = False,
        overwrite_critic_adapter: bool | None = None,
        merge_lora_configs: bool = False,
    ) -> None:
        """Read weights and state into this agent; see `Agent.load_checkpoint`.

        Args:
            path: Folder written by `save_checkpoint`, or by PEFT.
            load_optimizer: Restore AdamW's moments as well.
            overwrite_reference_adapter: Take the checkpoint's actor as the reference even when it
                carries one.
            overwrite_critic_adapter: Refused: GRPO has no critic.
            merge_lora_configs: Reconcile a LoRA configuration that differs from the live one.

        Raises:
            CheckpointError: Files are missing, truncated, or belong to another base.
            ConfigError: For `overwrite_critic_adapter`.
        """
        if overwrite_critic_adapter is not None:
            check_critic("overwrite_critic_adapter")
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
        """Build an agent from a checkpoint, over its own base; see `Agent.load`.

        Args:
            path: Folder written by `save_checkpoint`.
            device: Where the base goes.
            accelerator: As for the constructor.
            trust_remote_code: Run Python code that comes with the files of the base.
        """
        stage = check_accelerator(accelerator)
        cohort, slot = load_one(
            cls.kind,
            path,
            str(device) if stage is None else accelerator.device.type,
            trust_remote_code=trust_remote_code,
            zero=stage,
            accelerator=None if stage is None else accelerator,
        )
        return cls.on(cohort, slot)

    def reinit_optimizers(self, optimizer: object = None) -> None:
        """Create AdamW anew, without moments.

        Args:
            optimizer: None, or an object whose `name` is "optimizer", the only optimizer.

        Raises:
            ConfigError: It names another optimizer.
        """
        name = getattr(optimizer, "name", optimizer)
        if name not in (None, OPTIMIZER):
            raise ConfigError(
                f"reinit_optimizers: expected None or the name {OPTIMIZER!r}, got {name!r}"
            )
        super().reinit_optimizers()

    @staticmethod
    def update_lr(  # pyright: ignore[reportIncompatibleMethodOverride] -- AgileRL returns an accelerator and a scheduler
        optimizer: torch.optim.Optimizer,
        lr: float | tuple[float, float],
        accelerator: object = None,
        scheduler_config: CosineLRScheduleConfig | None = None,
    ) -> tuple[object, LambdaLR | None]:
        """Set an optimizer's learning rate; see `Agent.update_lr`.

        Args:
            optimizer: Any optimizer, or that of an agent (`evolvable_attributes()["optimizer"]`).
            lr: The new rate. A pair, for actor and critic, is refused: GRPO has no critic.
            accelerator: Returned unchanged.
            scheduler_config: Configuration of a scheduler for your own training loop. With the
                optimizer of an agent this warns, because `learn` follows the
                `cosine_lr_schedule_config` of the agent's constructor.

        Returns:
            (accelerator, scheduler): the scheduler is None without a config.

        Raises:
            ConfigError: The rate is no finite number > 0, or the accelerator is of another type.
        """
        check_accelerator(accelerator)
        if isinstance(lr, tuple):
            raise ConfigError(f"lr: expected one number, GRPO has no critic, got the pair {lr}")
        Agent.update_lr(optimizer, lr)
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

    def register_network_group(self, group: object) -> None:
        """Accept the group of the network "actor", the only network of the agent.

        Raises:
            ConfigError: The evaluation network of the group is another one.
        """
        name = getattr(group, "eval_network", group)
        name = getattr(name, "name", name)
        if name != POLICY:
            raise ConfigError(
                f"register_network_group: expected the evaluation network {POLICY!r}, the only "
                f"network of a GRPO agent, got {name!r}"
            )


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
    """Clipped importance-sampling weights (MiniMax 2025, arXiv:2506.13585).

    The weights are clipped instead of the updates.
    """

    kind = "cispo"


def _warn_of_other_padding(base: SharedBase) -> None:
    pad_id, pad_token = base.padding or (0, None)
    if pad_token is None or base.tokenizer is None:
        return
    own = base.tokenizer.convert_ids_to_tokens(pad_id)
    if own != pad_token:
        warnings.warn(
            f"pad_token: expected the string of token {pad_id}, {own!r}, got {pad_token!r}; the id "
            "is what is written into padding",
            UserWarning,
            stacklevel=3,
        )


def _check_wrapper(wrapper: object, settings: object) -> None:
    if wrapper is not None and not callable(wrapper):
        raise ConfigError(f"wrapper_cls: expected a class, or None, got {wrapper!r}")
    if settings is not None and wrapper is None:
        raise ConfigError(
            f"wrapper_kwargs: has no effect without wrapper_cls, got {settings!r}; give it too"
        )
    if settings is not None and not is_keywords(settings):
        raise ConfigError(f"wrapper_kwargs: expected a mapping of keywords, got {settings!r}")


def _space_dim(space: Any) -> tuple[Any, ...]:  # noqa: ANN401 -- any gymnasium space, or TextSpace
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
        return tuple(_space_dim(part) for part in parts.values())
    if isinstance(parts, list | tuple):
        return tuple(_space_dim(part) for part in parts)
    if hasattr(space, "vocab_size"):
        return (int(space.vocab_size),)
    if hasattr(space, "nvec"):
        return tuple(int(n) for n in np.ravel(space.nvec))
    if hasattr(space, "n"):
        return tuple(int(n) for n in np.ravel(space.n))
    if getattr(space, "shape", None) is not None:
        return tuple(space.shape)
    raise ConfigError(f"space: expected a gymnasium space or a text space, got {space!r}")
