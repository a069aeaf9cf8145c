"""RunConfig and population.yaml: errors name YAML path, what was expected and what came."""

from evo_grpo.settings.evolve import (
    EvolveConfig,
    FitnessConfig,
    HyperparameterRange,
    MutationConfig,
    SelectionConfig,
)
from evo_grpo.settings.groups import (
    AlgorithmConfig,
    EngineConfig,
    EnvConfig,
    LoraSettings,
    Message,
    ModelConfig,
    PopulationConfig,
    RecordConfig,
)
from evo_grpo.settings.run import RunConfig, warnings
from evo_grpo.settings.yaml import from_dict, load, template, to_yaml

__all__ = [
    "AlgorithmConfig",
    "EngineConfig",
    "EnvConfig",
    "EvolveConfig",
    "FitnessConfig",
    "HyperparameterRange",
    "LoraSettings",
    "Message",
    "ModelConfig",
    "MutationConfig",
    "PopulationConfig",
    "RecordConfig",
    "RunConfig",
    "SelectionConfig",
    "from_dict",
    "load",
    "template",
    "to_yaml",
    "warnings",
]
