"""RunConfig, the whole of a population.yaml; AgentSettings, the part that agents are made of."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Iterable
from typing import Self

from pydantic import model_validator

from evo_grpo.errors import ConfigError
from evo_grpo.schema.group import Group, setting
from evo_grpo.schema.problems import Problem, Problems
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.settings.algorithm import AlgorithmConfig
from evo_grpo.settings.cross_checks import (
    agent_problems,
    dead_of_engine,
    dead_settings,
    run_problems,
    shard_problems,
    vllm_problems,
)
from evo_grpo.settings.engine import EngineConfig, PopulationConfig, RecordConfig
from evo_grpo.settings.env import EnvConfig
from evo_grpo.settings.evolve import EvolveConfig, Ranges, search_space
from evo_grpo.settings.model import LoraSettings, ModelConfig


def _below(group: str, found: Iterable[Problem]) -> list[Problem]:
    return [problem._replace(path=(group, *problem.path)) for problem in found]


class AgentSettings(Group):
    """What agents are made of: what the constructors take, and a run file without its run.

    `model` is None where a transformers module was given in Python.
    """

    seed: int = setting(0, "Every random number follows from it; any integer of up to 20 digits.")
    model: ModelConfig | None = setting(None, "The base model, or just its name.")
    algorithm: AlgorithmConfig = setting(AlgorithmConfig(), "What an agent begins with.")
    engine: EngineConfig = setting(EngineConfig(), "Where and how it computes.")
    hyperparameters: Ranges = setting(None, "What may mutate; see `evolve.hyperparameters`.")

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        ranges = {} if self.hyperparameters is None else self.hyperparameters
        found = [
            *agent_problems(self.algorithm, self.engine, ranges),
            *_below("engine", vllm_problems(self.engine)),
        ]
        if found:
            raise Problems(*found)
        return self

    def search_space(self) -> HyperparameterConfig:
        """Return what may mutate, as evolution sees it."""
        return search_space(self.hyperparameters, self.algorithm.hparams())

    @property
    def lora(self) -> LoraSettings:
        """The adapter's settings, those of a module given in Python too."""
        return LoraSettings() if self.model is None else self.model.lora


class RunConfig(Group):
    """A whole run. `model` and `env` are required, all else has defaults that learn.

    Raises:
        ConfigError: For all problems at once, one line each, with their YAML paths.
    """

    name: str = setting(
        "population",
        "Name of the run; its folder is `runs/<name>-<n>`.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    )
    seed: int = setting(
        0, "Every random number of the run follows from it; any integer of up to 20 digits."
    )
    model: ModelConfig = setting(meaning="The base model, or just its name.")
    env: EnvConfig = setting(meaning="The task, or just its kind.")
    population: PopulationConfig = setting(
        PopulationConfig(), "How many agents train for how long."
    )
    algorithm: AlgorithmConfig = setting(AlgorithmConfig(), "What an agent begins with.")
    evolve: EvolveConfig = setting(EvolveConfig(), "What happens between two rounds.")
    engine: EngineConfig = setting(EngineConfig(), "Where and how it computes.")
    record: RecordConfig = setting(RecordConfig(), "What a run keeps.")

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        found = [
            *run_problems(self.env, self.population, self.algorithm, self.evolve),
            *shard_problems(self.population, self.evolve, self.engine),
            *agent_problems(
                self.algorithm, self.engine, self.evolve.hyperparameters or {}, yaml=True
            ),
            *_below("engine", vllm_problems(self.engine, self.model.lora)),
        ]
        if found:
            raise Problems(*found)
        return self

    def agents(self) -> AgentSettings:
        """Return what the agents are made of."""
        return AgentSettings(
            seed=self.seed,
            model=self.model,
            algorithm=self.algorithm,
            engine=self.engine,
            hyperparameters=self.evolve.hyperparameters,
        )


def warnings(config: RunConfig) -> list[str]:
    """Return a sentence for each allowed setting that cannot have the effect it promises."""
    return [
        *dead_settings(config.population, config.algorithm, config.evolve, config.engine),
        *dead_of_engine(config.engine),
    ]


def check_comparable(config: RunConfig) -> None:
    """Refuse a run that cannot be compared, before it trains.

    Raises:
        ConfigError: It has fewer than two agents.
    """
    if config.population.size < 2:
        raise ConfigError(
            f"population.size: expected at least 2 agents to compare with as many without "
            f"evolution, got {config.population.size}; raise it, or run without --compare"
        )
