"""`RunConfig`, a whole population.yaml, and `AgentSettings`, the settings of the agents."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Iterator, Mapping
from typing import Self, TypeVar

from pydantic import model_validator

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.kinds import UserStrategy
from evo_grpo.evolve.start import Start, with_values
from evo_grpo.schema.group import Group, setting
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.problems import refuse
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.settings.algorithm import DEFAULT_PROMPTS, AlgorithmConfig
from evo_grpo.settings.cross_checks import agent_problems, divides_quantized, run_problems
from evo_grpo.settings.engine import EngineConfig
from evo_grpo.settings.env import EnvConfig
from evo_grpo.settings.evaluations import settled
from evo_grpo.settings.evolve import EvolveConfig, Ranges, search_space
from evo_grpo.settings.learning_rate import unusual_lr, with_default_lr
from evo_grpo.settings.model import LoraSettings, ModelConfig, TargetSets
from evo_grpo.settings.population import PopulationConfig
from evo_grpo.settings.record import RecordConfig
from evo_grpo.settings.without_effect import Finding, KnownSettings, without_effect

GroupT = TypeVar("GroupT", bound=Group)


def _with_values(group: GroupT, **values: object) -> GroupT:
    """Set values of a frozen group whose validation has not ended, and return the group."""
    for name, value in values.items():
        object.__setattr__(group, name, value)  # the group is frozen
    return group


class AgentSettings(Group):
    """The settings of agents, which the constructors take; also a part of `RunConfig`.

    `model` is None if a transformers module was given in Python.
    """

    seed: int = setting(0, "Seed of all random numbers; any integer of up to 20 digits.")
    model: ModelConfig | None = setting(None, "The base model: a name, or a group of settings.")
    algorithm: AlgorithmConfig = setting(
        AlgorithmConfig(), "Initial hyperparameters, loss, advantages and lengths."
    )
    engine: EngineConfig = setting(
        EngineConfig(), "Devices, precision, memory and the rollout engine."
    )
    hyperparameters: Ranges = setting(
        None, "Ranges of the hyperparameters that may mutate; see `evolve.hyperparameters`."
    )
    target_sets: TargetSets = setting(
        factory=dict[str, str | list[str]],
        meaning="`target_sets` of the adapters of a module; a named model has its own.",
    )

    @model_validator(mode="after")
    def _with_default_lr(self) -> Self:
        algorithm, ranges = with_default_lr(self.algorithm, self.hyperparameters, self.model)
        return _with_values(self, algorithm=algorithm, hyperparameters=ranges)

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        refuse(agent_problems(self.algorithm, self.engine, self.hyperparameters, self.model))
        return self

    def search_space(self) -> HyperparameterConfig:
        """Return the ranges in which hyperparameters may mutate, with the default filled in."""
        return search_space(self.hyperparameters, self.algorithm.hparams())

    @property
    def lora(self) -> LoraSettings:
        """The settings of the adapters; if the base is a module, defaults with `target_sets`."""
        if self.model is None:
            return LoraSettings(target_sets=self.target_sets)
        return self.model.lora


class RunConfig(Group):
    """The settings of a run. `model` and `env` are required; all others have defaults.

    Raises:
        ConfigError: For all problems at once, one line each, with their YAML paths.
    """

    name: str = setting(
        "population",
        "Name of the run; its folder is `runs/<name>-<n>`.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=200,
    )
    seed: int = setting(0, "Seed of all random numbers of the run; any integer of up to 20 digits.")
    model: ModelConfig = setting(
        meaning="The base model: a name such as tiny-sums, or its settings."
    )
    env: EnvConfig = setting(meaning="The task: a kind such as sums, or its settings.")
    population: PopulationConfig = setting(
        PopulationConfig(), "Number of agents, and length of their training."
    )
    algorithm: AlgorithmConfig = setting(
        AlgorithmConfig(), "Initial hyperparameters, loss, advantages and lengths."
    )
    evolve: EvolveConfig = setting(EvolveConfig(), "Selection, exploration and fitness.")
    engine: EngineConfig = setting(
        EngineConfig(), "Devices, precision, memory and the rollout engine."
    )
    record: RecordConfig = setting(
        RecordConfig(), "What the run folder keeps, and which readers follow the run."
    )

    @model_validator(mode="after")
    def _with_default_lr(self) -> Self:
        algorithm, ranges = with_default_lr(self.algorithm, self.evolve.hyperparameters, self.model)
        evolve = self.evolve
        if ranges is not evolve.hyperparameters:
            evolve = evolve.replace(hyperparameters=ranges)
        return _with_values(self, algorithm=algorithm, evolve=evolve)

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        groups = (self.model, self.env, self.population, self.algorithm, self.evolve)
        of_agents = agent_problems(
            self.algorithm,
            self.engine,
            self.evolve.hyperparameters,
            self.model,
            own_lora=False,
            above=("evolve", "hyperparameters"),
        )
        refuse([*run_problems(*groups), *of_agents])
        return self

    def search_space(self) -> HyperparameterConfig:
        """Return the ranges in which hyperparameters may mutate, with the default filled in."""
        return search_space(self.evolve.hyperparameters, self.algorithm.hparams())

    @property
    def largest_lora(self) -> LoraSettings:
        """The settings of adapters, with the largest rank and all layers that an agent may have."""
        return self.model.lora.largest(self.search_space())

    @property
    def most_processes(self) -> int:
        """Greatest number of processes with which every process has agents in every round."""
        places = self.population.places(selects=self.evolve.selects)
        return min(self.engine.shards or 1, *places[: self.population.rounds])

    def first_hparams(self) -> Hparams:
        """Return the hyperparameters with which the first agent begins."""
        return self.algorithm.first_hparams(self.search_space(), self.model.lora.rank_alpha)

    def settled(self, output_tokens: int) -> Self:
        """Return settings with values in place of nulls whose meaning depends on the run's length.

        A run records the settings, so that they stay the same if the run is extended.
        `output_tokens` is the longest completion in tokens if the settings do not limit it.
        """
        population, algorithm = self.population, self.algorithm
        output_tokens = algorithm.longest_output(self.search_space()) or output_tokens
        rows = population.size * (algorithm.prompts_per_step or DEFAULT_PROMPTS)
        tokens = rows * algorithm.group_size * population.steps_per_round * output_tokens
        population, evolve = settled(
            population, self.evolve, algorithm, self.search_space(), tokens
        )
        return self.replace(population=population, evolve=evolve)

    def agents(self) -> AgentSettings:
        """Return the settings of the agents."""
        return AgentSettings(
            seed=self.seed,
            model=self.model,
            algorithm=self.algorithm,
            engine=self.engine,
            hyperparameters=self.evolve.hyperparameters,
        )


def warnings(config: RunConfig) -> list[str]:
    """Return a sentence for each valid setting that has no effect or is doubtful."""
    return [*map(str, without_effect_of_run(config)), *doubts_of_run(config)]


def doubts_of_run(config: RunConfig) -> list[str]:
    """Return a sentence for each doubtful setting, or combination of settings, of a run."""
    population = config.population
    doubts = doubts_of_agents(config.agents(), population.init)
    if population.size > 1 and isinstance(population.init, str) and not config.search_space():
        doubts.append("evolve.hyperparameters is empty, so all agents train alike; leave it out")
    if why := divides_quantized(config.engine):
        doubts.append(why)
    return [*doubts, *_unsearched(config)]


def _unsearched(config: RunConfig) -> Iterator[str]:
    """Yield a sentence if several prompts, or any sets of layers, are given but not searched."""
    searched, prompts = config.search_space().names(), list(config.env.prompts or ())
    sets, several = list(config.model.lora.target_sets), prompts if len(prompts) > 1 else []
    for place, names, key, used in (
        ("env.prompts", several, "prompt", "the first"),
        ("model.lora.target_sets", sets, "lora.target_modules", "none"),
    ):
        if names and key not in searched:
            listed = ", ".join(names)
            yield (
                f"{place} has {listed}, of which all agents have {used}: search them with "
                f"evolve.hyperparameters.{key}: {{choices: [{listed}]}}, or leave them out"
            )


def doubts_of_agents(settings: AgentSettings, init: Start = "same") -> list[str]:
    """Return a sentence for each doubtful setting of agents whose environment is not known."""
    hparams = settings.algorithm.hparams()
    initial = _begin(settings.algorithm, settings.search_space(), init, settings.lora)
    lr = unusual_lr(settings.model, hparams, initial, settings.hyperparameters)
    return [] if lr is None else [lr]


def without_effect_of_run(config: RunConfig) -> list[Finding]:
    """Return a finding for each setting of a run that is given but has no effect."""
    settings = KnownSettings(
        config.algorithm,
        config.search_space(),
        config.engine,
        _begin(config.algorithm, config.search_space(), config.population.init, config.model.lora),
        prompts=config.algorithm.prompts_per_step or DEFAULT_PROMPTS,
        population=config.population,
        evolve=config.evolve,
        own_exploration=isinstance(config.evolve.exploration, UserStrategy),
    )
    return without_effect(settings)


def without_effect_of_agents(settings: AgentSettings, init: Start = "same") -> list[Finding]:
    """Return a finding for each setting of agents that is given but has no effect anywhere."""
    initial = _begin(settings.algorithm, settings.search_space(), init, settings.lora)
    return without_effect(
        KnownSettings(settings.algorithm, settings.search_space(), settings.engine, initial)
    )


def _begin(
    algorithm: AlgorithmConfig, space: HyperparameterConfig, init: Start, lora: LoraSettings
) -> list[Hparams]:
    hparams = algorithm.first_hparams(space, lora.rank_alpha)
    if isinstance(init, str | Mapping):
        return [hparams]
    return [with_values(hparams, values, space.names()) for values in init]


def check_comparable(config: RunConfig) -> None:
    """Raise ConfigError if a run that is to be compared with others has fewer than two agents."""
    if config.population.size < 2:
        raise ConfigError(
            "population.size: expected at least 2 agents to compare with those without evolution, "
            f"got {config.population.size}; raise it, or run without --compare"
        )
