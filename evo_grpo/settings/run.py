"""RunConfig: the whole of a population.yaml."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from evo_grpo.errors import ConfigError
from evo_grpo.settings.cross_checks import contradictions, dead_settings
from evo_grpo.settings.evolve import EvolveConfig
from evo_grpo.settings.group import Group, Problems
from evo_grpo.settings.groups import (
    AlgorithmConfig,
    EngineConfig,
    EnvConfig,
    ModelConfig,
    PopulationConfig,
    RecordConfig,
)
from evo_grpo.settings.messages import describe, joined


class RunConfig(Group):
    """A whole run. `model` and `env` are required, all else has defaults that learn.

    Raises:
        ConfigError: For all problems at once, one line each, with their YAML paths.
    """

    name: str = Field(
        default="population",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run; its folder is `runs/<name>-<n>`.",
    )
    seed: int = Field(
        default=0,
        description="Every random number of the run follows from it; any whole number.",
    )
    model: ModelConfig = Field(description="The base model, or just its name.")
    env: EnvConfig = Field(description="The task, or just its kind.")
    population: PopulationConfig = Field(
        default=PopulationConfig(), description="How many agents train for how long."
    )
    algorithm: AlgorithmConfig = Field(
        default=AlgorithmConfig(), description="What an agent begins with."
    )
    evolve: EvolveConfig = Field(
        default=EvolveConfig(), description="What happens between two rounds."
    )
    engine: EngineConfig = Field(default=EngineConfig(), description="Where and how it computes.")
    record: RecordConfig = Field(default=RecordConfig(), description="What a run keeps.")

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            lines = describe(error, type(self))
            raise ConfigError(joined(lines, "configuration")) from None

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        found = contradictions(self.env, self.population, self.algorithm, self.evolve)
        if problems := tuple(found):
            raise Problems(*problems)
        return self


def warnings(config: RunConfig) -> list[str]:
    """Return a sentence for each allowed setting that cannot have the effect it promises."""
    return list(dead_settings(config.population, config.algorithm, config.evolve))
