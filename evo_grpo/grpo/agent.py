"""GRPO, GSPO and CISPO: thin handles on one slot of a cohort.

They hold no weights and no loops of their own. Their methods have the reference API's signatures,
so flags may be given by position.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, final

import numpy as np
from torch import Tensor

from evo_grpo.envs.experience import Environment
from evo_grpo.envs.multi_turn import TokenObservationWrapper
from evo_grpo.envs.multi_turn_gym import MultiTurnGym
from evo_grpo.errors import ConfigError, ShapeError
from evo_grpo.evaluate import evaluate
from evo_grpo.grpo.adopt import build_agents
from evo_grpo.grpo.advantages import group_advantages
from evo_grpo.grpo.agent_files import AgentFiles
from evo_grpo.grpo.attributes import read_attributes
from evo_grpo.grpo.batch import AgentBatch
from evo_grpo.grpo.build import read_arguments
from evo_grpo.grpo.cohort import Cohort
from evo_grpo.grpo.experience import Observation, to_prompts, to_rows, to_tensors
from evo_grpo.grpo.population import Population
from evo_grpo.grpo.saved_arguments import constructor_arguments
from evo_grpo.grpo.settings import AgentSettings
from evo_grpo.hparams import Hparams, HyperparameterConfig


class PolicyAgent(AgentFiles, ABC):
    """One agent: LoRA adapter, optimizer and hyperparameters over a base that others may share.

    Args:
        *args: `observation_space, action_space` of the older API (told by type, and not needed),
            or `pad_token_id, pad_token`.
        **kwargs: The groups of `evo_grpo.grpo.settings`, by their fields' names.

    Raises:
        ConfigError: For an unknown argument or a value out of range.
        ModelError: When the base cannot be loaded.
    """

    default_loss: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build a base of one's own; `population` shares one among many."""
        settings = read_arguments(args, kwargs, default_loss=self.default_loss)
        settings, cohort, (slot,) = build_agents(settings)
        self._bind(cohort, slot, settings)

    def _bind(self, cohort: Cohort, slot: int, settings: AgentSettings) -> None:
        self.cohort = cohort
        self.slot = slot
        self.settings = settings
        self.index = settings.model.index
        self.training = True

    @classmethod
    def on(cls, cohort: Cohort, slot: int, settings: AgentSettings, index: int) -> Self:
        """Return a handle on an agent that exists already."""
        agent = cls.__new__(cls)
        agent._bind(cohort, slot, settings)
        agent.index = index
        return agent

    @classmethod
    def population(
        cls,
        size: int,
        *args: Any,
        wrapper_cls: Callable[..., Any] | None = None,
        wrapper_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Population[Any]:
        """Create agents over one shared base, alike in hyperparameters and initial adapter.

        Args:
            size: N agents, >= 1.
            *args: As for the constructor.
            wrapper_cls: Called with each agent; what it returns stands in the population.
            wrapper_kwargs: Keywords for it.
            **kwargs: As for the constructor.

        Returns:
            A sequence of N agents that generate, learn and are tested together.
        """
        if size < 1:
            raise ConfigError(f"population: size must be >= 1, got {size}")
        settings = read_arguments(args, kwargs, default_loss=cls.default_loss)
        settings, cohort, slots = build_agents(settings, size)
        agents: list[Any] = [cls.on(cohort, slot, settings, i) for i, slot in enumerate(slots)]
        if wrapper_cls is not None:
            agents = [wrapper_cls(agent, **(wrapper_kwargs or {})) for agent in agents]
        return Population(cohort, agents, slots)

    @property
    def hparams(self) -> Hparams:
        """What the agent trains with; assign to change it."""
        return self.state.hparams

    @hparams.setter
    def hparams(self, value: Hparams) -> None:
        self.cohort.set_hparams(self.slot, value)

    @property
    def hp_config(self) -> HyperparameterConfig:
        """What may mutate."""
        return self.cohort.hp_config

    @property
    def fitness(self) -> list[float]:
        """The present member's own fitness values, latest last."""
        return [score.mean for score in self.state.history]

    @property
    def steps(self) -> int:
        """GRPO steps taken."""
        return self.state.steps

    def clone(self, index: int | None = None, wrap: bool = True) -> Self:
        """Return a new agent over the same base with the same weights, moments, hyperparameters.

        Args:
            index: The clone's index; None takes this one's.
            wrap: Accepted for the reference API; nothing is wrapped here.
        """
        del wrap
        state = self.cohort.add(self.hparams)
        self.cohort.copy(self.slot, state.slot)
        number = self.index if index is None else index
        clone = type(self).on(self.cohort, state.slot, self.settings, number)
        return self.copy_attributes(self, clone)

    @staticmethod
    def copy_attributes(agent: PolicyAgent, clone: Any) -> Any:  # noqa: ANN401 -- returns what it was given
        """Copy what is neither weights nor optimizer.

        Hyperparameters, step count, fitness history, last metrics, training mode.
        """
        clone.cohort.set_hparams(clone.slot, agent.hparams)
        clone.state.steps = agent.state.steps
        clone.state.history = list(agent.state.history)
        clone.state.last = dict(agent.state.last)
        clone.state.reference_updates = agent.state.reference_updates
        clone.training = agent.training
        return clone

    def get_action(
        self,
        obs: Observation | Sequence[Observation],
        training: bool = True,
        repeat_prompts: bool = True,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Sample completions.

        Args:
            obs: Prompts: `Prompt`, text, or mappings with `input_ids`.
            training: True samples with the agent's own settings, False with temperature 1 and no
                filters.
            repeat_prompts: True samples group_size completions per prompt in training, else one.

        Returns:
            Per prompt: ids (G, T) int64 of prompt and completion, and action masks (G, T - 1) bool.
        """
        training = training and self.training
        prompts = to_prompts(obs, self.cohort.base.tokenizer, self.cohort.base.vocabulary)
        samples = self.hparams.group_size if training and repeat_prompts else 1
        sampling = self.cohort.sampling(
            self.hparams if training else Hparams(temperature=1.0, top_p=1.0, top_k=0)
        )
        count = self.cohort.next_call()
        (groups,) = self.cohort.generate(
            [self.slot], prompts, stream=("action", count), samples=samples, sampling=sampling
        )
        return to_tensors(groups, self.cohort.base.pad_id)

    def learn(
        self, experiences: tuple[Sequence[Tensor], Sequence[Tensor], Any]
    ) -> dict[str, float]:
        """Take one GRPO step.

        Args:
            experiences: (ids, action masks, rewards): per group (G, T) and (G, T - 1), and rewards
                (P, G) or (P * G,).

        Returns:
            The learner's metrics.
        """
        metrics = self.cohort.learn([agent_batch(self, experiences)], stream=("learn", self.steps))
        return dict(metrics[0])

    def test(self, env: Environment[Any] | TokenObservationWrapper, loop: int = 1) -> np.ndarray:
        """Evaluate on the test split, one completion or episode per start at temperature 1.

        Args:
            env: The environment; a `TokenObservationWrapper` plays one episode after the other.
            loop: Repetitions, with new draws each.

        Returns:
            (loop * P,) rewards; their mean is appended to `fitness`.
        """
        if isinstance(env, TokenObservationWrapper):
            env = MultiTurnGym.of(env)
        self.cohort.suit(env)
        (result,) = evaluate(
            self.cohort,
            env,
            [self.slot],
            env.prompts("test", None),
            samples=loop,
            temperature=1.0,
            stream=("test", self.cohort.next_call()),
        )
        self.state.history.append(result.score)
        return result.rewards

    @classmethod
    def load(cls, path: str | Path, device: str = "cpu", accelerator: object = None) -> Self:
        """Build an agent from a checkpoint, over its own base.

        Args:
            path: Folder written by `save_checkpoint`; the base comes from its `base/` folder, else
                by the name it was loaded by.
            device: Where the base goes.
            accelerator: Only None is supported.

        Raises:
            CheckpointError: When the folder is no checkpoint, or lacks a file.
            ConfigError: When it is a checkpoint of another class.
            ModelError: When the base cannot be loaded by its name.
        """
        folder = Path(path)
        attributes = read_attributes(folder)
        arguments = constructor_arguments(folder, attributes, cls.__name__)
        agent = cls(**{**arguments, "device": device, "accelerator": accelerator})
        agent.load_checkpoint(path, load_optimizer=bool(attributes.get("has_optimizer")))
        return agent


@final
class GRPO(PolicyAgent):
    """Group Relative Policy Optimization (Shao et al. 2024, arXiv:2402.03300)."""

    default_loss = "grpo"


@final
class GSPO(PolicyAgent):
    """Group Sequence Policy Optimization: one ratio per sequence (Zheng 2025, arXiv:2507.18071)."""

    default_loss = "gspo"


@final
class CISPO(PolicyAgent):
    """Clipped importance-sampling weights (MiniMax 2025, arXiv:2506.13585).

    The weights are clipped instead of the updates.
    """

    default_loss = "cispo"


def agent_batch(
    agent: PolicyAgent, experiences: tuple[Sequence[Tensor], Sequence[Tensor], Any]
) -> AgentBatch:
    """Turn (ids, masks, rewards) into rows with advantages.

    Raises:
        ShapeError: When the rewards do not count one per completion.
    """
    ids, masks, rewards = experiences
    values = np.asarray(
        rewards.detach().cpu() if isinstance(rewards, Tensor) else rewards, dtype=np.float64
    ).reshape(-1)
    sizes = [group.shape[0] for group in ids]
    if len(values) != sum(sizes):
        raise ShapeError(
            f"learn: expected one reward per completion, {sum(sizes)} for groups of {sizes}, "
            f"got {len(values)}"
        )
    size = sizes[0] if len(set(sizes)) == 1 else sizes
    advantages = group_advantages(values, size, scale=agent.cohort.options.adv_scale)
    return AgentBatch(agent.slot, to_rows(ids, masks, advantages))
