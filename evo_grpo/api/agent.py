"""Defines GRPO, GSPO and CISPO; an instance refers to an agent of a cohort and holds no weights."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, Unpack, final

import numpy as np
from torch import Tensor

from evo_grpo.api import tensors
from evo_grpo.api.by_keyword import AGENT_FIELDS, POPULATION_FIELDS, by_keyword
from evo_grpo.api.calls import checked_start, separated, warn_of_settings
from evo_grpo.api.keywords import AgentKeywords, PopulationKeywords
from evo_grpo.api.population import HANDLES, Population, tested
from evo_grpo.api.saved import load_one
from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv, TokenObservationWrapper
from evo_grpo.envs.protocol import Environment
from evo_grpo.evolve.start import Start
from evo_grpo.learn.rows import AgentBatch
from evo_grpo.model.ends import StopRules
from evo_grpo.population.checkpoints.read import load_agent
from evo_grpo.population.checkpoints.write import save_agent
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.state import AgentState
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.schema.validation import check_folder, flag, whole
from evo_grpo.settings import AgentSettings, PopulationConfig
from evo_grpo.settings.keywords import POPULATION_KEYWORDS
from evo_grpo.training.assemble import Objects, build_agents


class Agent(ABC):
    """One agent: a LoRA adapter, an optimizer and hyperparameters over a base model.

    Agents of one population share the base.

    Attributes:
        cohort: The state that all agents over the base share.
        slot: Number of the agent in the cohort.
        index: Position of the agent in its population.
        training: Whether `get_action` samples with the agent's settings; else at temperature 1.
    """

    kind: ClassVar[str]

    cohort: Cohort
    slot: int
    index: int
    training: bool

    @by_keyword(AGENT_FIELDS, AgentKeywords)
    def __init__(self, **settings: Unpack[AgentKeywords]) -> None:
        """Build one agent over a new base; see `population` for several agents over one base.

        Args:
            **settings: Settings; docs/configuration.md has their meaning, `help` their types.

        Raises:
            ConfigError: An unknown name, a value of a wrong type or out of range, or values that
                contradict each other.
            ModelError: The base cannot be loaded.
        """
        agent_settings, objects = separated(settings, self.kind)
        warn_of_settings(agent_settings)
        self._build(agent_settings, objects)

    @classmethod
    @by_keyword(POPULATION_FIELDS, PopulationKeywords)
    def population(cls, **settings: Unpack[PopulationKeywords]) -> Population[Any]:
        """Build agents over one shared base; returns a sequence of them."""
        keywords: dict[str, Any] = {**settings}
        population_keywords = {name: keywords.pop(name) for name in POPULATION_KEYWORDS}
        whole(1, "it counts agents").check("size", population_keywords["size"])
        population = PopulationConfig(**population_keywords)
        agent_settings, objects = separated(keywords, cls.kind)
        init = checked_start(population, agent_settings, objects)  # before a model is loaded
        warn_of_settings(agent_settings, init)
        agents = cls._build_several(agent_settings, objects, size=population.size, init=init)
        return Population(agents[0].cohort, agents)

    def _build(self, settings: AgentSettings, objects: Objects, *, index: int = 0) -> None:
        cohort, (slot,) = build_agents(settings, objects, 1, "same")
        self._bind(cohort, slot, index)

    @classmethod
    def _build_several(
        cls, settings: AgentSettings, objects: Objects, *, size: int, init: Start
    ) -> list[Self]:
        cohort, slots = build_agents(settings, objects, size, init)
        return [cls.on(cohort, slot, index) for index, slot in enumerate(slots)]

    @classmethod
    def on(cls, cohort: Cohort, slot: int, index: int = 0) -> Self:
        """Return a handle on an existing agent of a cohort."""
        agent = cls.__new__(cls)
        agent._bind(cohort, slot, index)
        return agent

    def _bind(self, cohort: Cohort, slot: int, index: int) -> None:
        self.cohort, self.slot, self.index = cohort, slot, index
        self.training = True

    def __repr__(self) -> str:
        fitness = f", fitness={self.fitness[-1]:.3f}" if self.fitness else ""
        return (
            f"{type(self).__name__}(agent {self.slot} of {len(self.cohort.agents)} over "
            f"{self.cohort.base.name!r}, lr={self.hparams.lr:.3g}, steps={self.steps}{fitness})"
        )

    @property
    def settings(self) -> AgentSettings:
        """The settings with which the agent was built; see `hparams` for present values."""
        return self.cohort.settings

    @property
    def state(self) -> AgentState:
        """The state of this agent in the cohort."""
        return self.cohort.check_slot(self.slot)

    @property
    def hparams(self) -> Hparams:
        """The agent's hyperparameters; assign to change them."""
        return self.state.hparams

    @hparams.setter
    def hparams(self, value: Hparams) -> None:
        self.cohort.set_hparams(self.slot, value)

    @property
    def hp_config(self) -> HyperparameterConfig:
        """The hyperparameters that may mutate, with their ranges."""
        return self.cohort.hp_config

    @property
    def fitness(self) -> list[float]:
        """Fitness values of the present member, latest last; after a round, only the latest 100."""
        return [score.mean for score in self.state.history]

    @property
    def steps(self) -> int:
        """Number of GRPO steps taken."""
        return self.state.steps

    def clone(self, index: int | None = None) -> Self:
        """Return a new agent of the same base, with equal weights, moments and hyperparameters."""
        state = self.cohort.add(self.hparams)
        self.cohort.copy(self.slot, state.slot)
        number = self.index if index is None else index
        return self.copy_attributes(self, type(self).on(self.cohort, state.slot, number))

    @staticmethod
    def copy_attributes(agent: Agent, clone: Any) -> Any:  # noqa: ANN401 -- returns what it was given
        """Copy hyperparameters, counters, scores and `training` to `clone`; return `clone`."""
        clone.cohort.set_hparams(clone.slot, agent.hparams)
        clone.state.counters = agent.state.counters
        clone.state.history = list(agent.state.history)
        clone.state.last = dict(agent.state.last)
        clone.training = agent.training
        return clone

    def get_action(
        self,
        obs: tensors.Observation | Sequence[tensors.Observation],
        training: bool = True,
        repeat_prompts: bool = True,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Sample completions of prompts.

        Args:
            obs: Prompts: `Prompt`, strings, or mappings with `input_ids`.
            training: True samples with the agent's settings, False at temperature 1, unfiltered.
            repeat_prompts: In training, sample group_size completions per prompt instead of one.

        Returns:
            Two lists with a tensor per prompt: ids (G, T) int64 of prompt and completion, and
            action masks (G, T - 1) bool.
        """
        training = training and self.training
        base = self.cohort.base
        prompts = tensors.to_prompts(obs, base.tokenizer, base.vocabulary)
        tensors.close_turns_with(obs, StopRules(base, self.settings.algorithm), base.pad_id)
        samples = self.hparams.group_size if training and repeat_prompts else 1
        plain = Hparams(max_output_tokens=self.hparams.max_output_tokens)
        sampling = self.cohort.sampling(self.hparams if training else plain)
        count = self.cohort.next_call()
        (groups,) = self.cohort.generate(
            [self.slot], prompts, stream=("action", count), samples=samples, sampling=sampling
        )
        return tensors.to_tensors(groups, base.pad_id)

    def learn(
        self, experiences: tuple[Sequence[Tensor], Sequence[Tensor], Any]
    ) -> dict[str, float]:
        """Take one GRPO step.

        Args:
            experiences: (ids, action masks, rewards): a tensor of ids (G, T) and one of masks
                (G, T - 1) per group, as `get_action` returns them, and rewards (P, G) or (P * G,).

        Returns:
            The learner's metrics, and `zero_variance`: the share of groups whose rewards are all
            equal, and whose advantages are therefore zero.

        Raises:
            ShapeError: The experiences have other types or shapes, or no generated token.
            RewardError: A reward is infinite or beyond 1e15.
        """
        base, scale = self.cohort.base, self.settings.algorithm.adv_scale(self.hparams)
        rows, constant = tensors.to_batch(experiences, scale, base.vocabulary)
        batch = AgentBatch(self.slot, rows)
        (metrics,) = self.cohort.learn([batch], stream=("learn", self.steps))
        self.state.last = {**metrics, "zero_variance": constant}
        return dict(self.state.last)

    def test(
        self,
        env: Environment[Any] | TokenObservationWrapper | MultiTurnEnv | str,
        loop: int = 1,
    ) -> np.ndarray:
        """Evaluate on the test split at temperature 1: a completion per prompt or episode per seed.

        Args:
            env: The environment, or the name of a task such as "sums"; a `TokenObservationWrapper`
                or a `MultiTurnEnv` plays one episode after the other.
            loop: Repetitions, each with new draws, >= 1.

        Returns:
            Rewards (loop * P,); their mean is appended to `fitness`.
        """
        (result,) = tested(self.cohort, env, [self.state.slot], loop)
        self.state.history.append(result.score)
        return result.rewards

    def save_checkpoint(
        self, path: str | Path, lora_only: bool = True, save_optimizer: bool = True
    ) -> None:
        """Write the agent to a folder; see `evo_grpo.population.checkpoints.write` for the layout.

        Args:
            path: The folder.
            lora_only: Omit the base, which all agents share; False writes it to `base/`.
            save_optimizer: Write AdamW's moments too.
        """
        folder = check_folder("save_checkpoint: path", path)
        for name, value in (("lora_only", lora_only), ("save_optimizer", save_optimizer)):
            flag().check(f"save_checkpoint: {name}", value)
        save_agent(
            self.cohort, self.slot, folder, lora_only=lora_only, save_optimizer=save_optimizer
        )

    def load_checkpoint(
        self,
        path: str | Path,
        load_optimizer: bool = False,
        overwrite_reference_adapter: bool = False,
        merge_lora_configs: bool = False,
    ) -> None:
        """Read weights and state into this agent; no other agent changes.

        Args:
            path: Folder written by `save_checkpoint` or by PEFT. The weights of a PEFT folder
                become the actor, and also the agent's reference adapter if there is one. If there
                is none, the reference stays the adapter that the agent started from, or the base.
            load_optimizer: Restore AdamW's moments as well.
            overwrite_reference_adapter: Use the checkpoint's actor as the reference even if the
                checkpoint has a reference.
            merge_lora_configs: Accept a LoRA configuration that differs from the agent's, and
                merge the two.

        Raises:
            CheckpointError: Files are missing or truncated, or belong to another base.
        """
        load_agent(
            self.cohort,
            self.slot,
            path,
            load_optimizer=load_optimizer,
            overwrite_reference_adapter=overwrite_reference_adapter,
            merge_lora_configs=merge_lora_configs,
        )

    @classmethod
    def load(
        cls, path: str | Path, device: str = "auto", *, trust_remote_code: bool = False
    ) -> Self:
        """Build an agent from a checkpoint, over a new base.

        Args:
            path: Folder written by `save_checkpoint`. The base is loaded from its `base/` folder if
                there is one, else by its name.
            device: Device of the base. The agent generates with the native engine, even if it was
                saved with another one.
            trust_remote_code: Run Python code that comes with the base; only for a base you trust.

        Raises:
            CheckpointError: The folder is not a checkpoint, or lacks a file.
            ConfigError: The checkpoint is of another class.
            ModelError: The base cannot be loaded by its name.
        """
        return cls.on(*load_one(cls.kind, path, device, trust_remote_code=trust_remote_code))


@final
class GRPO(Agent):
    """Group Relative Policy Optimization (Shao et al. 2024, arXiv:2402.03300)."""

    kind = "grpo"


@final
class GSPO(Agent):
    """Group Sequence Policy Optimization: one ratio per sequence (Zheng 2025, arXiv:2507.18071)."""

    kind = "gspo"


@final
class CISPO(Agent):
    """CISPO: clips importance-sampling weights, not updates (MiniMax 2025, arXiv:2506.13585)."""

    kind = "cispo"


HANDLES.update({agent.kind: agent for agent in (GRPO, GSPO, CISPO)})
