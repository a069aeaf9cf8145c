"""RunConfig, the whole of a population.yaml; AgentSettings, the part that agents are made of."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import Self

from pydantic import model_validator

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.kinds import OwnStrategy
from evo_grpo.evolve.start import Start, with_values
from evo_grpo.schema.group import Group, setting
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.problems import Problems
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.settings.algorithm import DEFAULT_PROMPTS, AlgorithmConfig
from evo_grpo.settings.cross_checks import agent_problems, doubtful_settings, run_problems
from evo_grpo.settings.engine import EngineConfig
from evo_grpo.settings.env import EnvConfig
from evo_grpo.settings.evolve import EvolveConfig, Ranges, search_space
from evo_grpo.settings.model import LoraSettings, ModelConfig
from evo_grpo.settings.population import PopulationConfig
from evo_grpo.settings.record import RecordConfig
from evo_grpo.settings.without_effect import Finding, Seen, without_effect


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
        found = list(agent_problems(self.algorithm, self.engine, self.hyperparameters))
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
            *run_problems(self.env, self.population, self.algorithm, self.evolve, self.engine),
            *agent_problems(
                self.algorithm,
                self.engine,
                self.evolve.hyperparameters,
                self.model.lora,
                above=("evolve", "hyperparameters"),
            ),
        ]
        if found:
            raise Problems(*found)
        return self

    def search_space(self) -> HyperparameterConfig:
        """Return what may mutate, as evolution sees it."""
        return search_space(self.evolve.hyperparameters, self.algorithm.hparams())

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
        *map(str, without_effect_of_run(config)),
        *doubtful_settings(config.population, config.algorithm, config.evolve, config.engine),
    ]


def without_effect_of_run(config: RunConfig) -> list[Finding]:
    """Return each setting of a run that was given and does nothing."""
    seen = Seen(
        config.algorithm,
        config.search_space(),
        config.engine,
        _begin(config.algorithm, config.population.init),
        prompts=config.algorithm.prompts_per_step or DEFAULT_PROMPTS,
        population=config.population,
        evolve=config.evolve,
        own_exploration=isinstance(config.evolve.exploration, OwnStrategy),
    )
    return without_effect(seen)


def without_effect_of_agents(settings: AgentSettings, init: Start = "same") -> list[Finding]:
    """Return the same for agents that Python makes, whatever they will play."""
    begin = _begin(settings.algorithm, init)
    return without_effect(Seen(settings.algorithm, settings.search_space(), settings.engine, begin))


def _begin(algorithm: AlgorithmConfig, init: Start) -> list[Hparams]:
    first = algorithm.hparams()
    return [first] if isinstance(init, str) else [with_values(first, values) for values in init]


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
