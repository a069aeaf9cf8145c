"""GRPO, GSPO and CISPO: thin handles on one slot of a cohort.

They hold no weights and no loops of their own. Their methods have the reference API's signatures,
so flags may be given by position.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self, final

import numpy as np
from torch import Tensor

from evo_grpo.api.agent_files import AgentFiles
from evo_grpo.api.from_peft import build_agents
from evo_grpo.api.population import Population
from evo_grpo.api.tensors import Observation, to_batch, to_prompts, to_tensors
from evo_grpo.api.worlds import environment_of
from evo_grpo.checkpoints.manifest import read_attributes
from evo_grpo.checkpoints.saved_arguments import constructor_arguments
from evo_grpo.cohort.arguments import PopulationArguments, refuse_extra
from evo_grpo.cohort.build import read_arguments, refuse_outside_ranges
from evo_grpo.cohort.cohort import Cohort
from evo_grpo.cohort.settings import AgentSettings
from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv, TokenObservationWrapper
from evo_grpo.envs.protocol import Environment
from evo_grpo.evaluate import evaluate
from evo_grpo.learner.rows import AgentBatch
from evo_grpo.schema.hparams import Hparams, HyperparameterConfig
from evo_grpo.validation import whole


class PolicyAgent(AgentFiles, ABC):
    """One agent: LoRA adapter, optimizer and hyperparameters over a base that others may share.

    Args:
        *args: `observation_space, action_space` of the older API (told by type, and not needed),
            or `pad_token_id, pad_token, model_name` and so on, in the order of
            `evo_grpo.cohort.arguments.POSITIONS`.
        **kwargs: The groups of `evo_grpo.cohort.settings`, by their fields' names.

    Raises:
        ConfigError: For an unknown argument, one that is given twice, or a value out of range.
        ModelError: When the base cannot be loaded.
    """

    default_loss: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build a base of one's own; `population` shares one among many."""
        settings = read_arguments(args, kwargs, default_loss=self.default_loss)
        refuse_outside_ranges(settings)
        self._build(settings)

    def _build(self, settings: AgentSettings) -> None:
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
    def population(cls, size: int, *args: Any, **kwargs: Any) -> Population[Any]:
        """Create agents over one shared base, alike in hyperparameters and initial adapter.

        Args:
            size: N agents, >= 1.
            *args: As for the constructor; two spaces may be followed by `wrapper_cls` and
                `wrapper_kwargs`.
            **kwargs: As for the constructor, and `wrapper_cls`, which is called with each agent,
                and what it returns stands in the population; `wrapper_kwargs` are keywords for it.

        Returns:
            A sequence of N agents that generate, learn and are tested together.
        """
        given = PopulationArguments.of(size, args, kwargs)
        settings = read_arguments((), given.arguments, default_loss=cls.default_loss)
        refuse_outside_ranges(settings)
        settings, cohort, slots = build_agents(settings, given.size)
        agents = [cls.on(cohort, slot, settings, i) for i, slot in enumerate(slots)]
        return Population(cohort, [given.wrapped(agent) for agent in agents], slots)

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
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Sample completions.

        Args:
            obs: Prompts: `Prompt`, text, or mappings with `input_ids`.
            training: True samples with the agent's own settings, False with temperature 1 and no
                filters.
            repeat_prompts: True samples group_size completions per prompt in training, else one.
            *args: Refused: the reference API takes more and gives them no meaning.
            **kwargs: As `*args`.

        Returns:
            Per prompt: ids (G, T) int64 of prompt and completion, and action masks (G, T - 1) bool.
        """
        refuse_extra("get_action", args, kwargs)
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
            The learner's metrics, and `zero_variance`: the share of groups whose rewards are all
            equal, which have no advantage.
        """
        base, scale = self.cohort.base, self.cohort.options.adv_scale
        rows, still = to_batch(experiences, scale, base.vocabulary)
        batch = AgentBatch(self.slot, rows)
        (metrics,) = self.cohort.learn([batch], stream=("learn", self.steps))
        self.state.last = {**metrics, "zero_variance": still}
        return dict(self.state.last)

    def test(
        self,
        env: Environment[Any] | TokenObservationWrapper | MultiTurnEnv | str,
        loop: int = 1,
        *args: Any,
        **kwargs: Any,
    ) -> np.ndarray:
        """Evaluate on the test split, one completion or episode per start at temperature 1.

        Args:
            env: The environment, or a task's name such as "sums"; a `TokenObservationWrapper` or
                a bare `MultiTurnEnv` plays one episode after the other.
            loop: Repetitions, with new draws each, >= 1.
            *args: Refused: the reference API takes more and gives them no meaning.
            **kwargs: As `*args`.

        Returns:
            (loop * P,) rewards; their mean is appended to `fitness`.
        """
        refuse_extra("test", args, kwargs)
        whole(1).check("loop", loop)
        world = environment_of(self.cohort, env)
        (result,) = evaluate(
            self.cohort,
            world,
            [self.slot],
            world.prompts("test", None),
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
        arguments = {**arguments, "device": device, "accelerator": accelerator}
        agent = cls.__new__(cls)
        settings = read_arguments((), arguments, default_loss=cls.default_loss)
        # What an agent came to by evolution or by hand may lie outside its ranges. Nor is it
        # refused for lengths that it was only warned of: here nobody spelled them out.
        agent._build(replace(settings, given=frozenset()))
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
