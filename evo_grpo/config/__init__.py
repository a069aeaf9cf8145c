"""RunConfig and population.yaml: errors name YAML path, what was expected and what came."""

from evo_grpo.config.evolution import (
    EvolveConfig,
    FitnessConfig,
    HyperparameterRange,
    MutationConfig,
    SelectionConfig,
)
from evo_grpo.config.files import from_dict, load, template, to_yaml
from evo_grpo.config.groups import (
    AlgorithmConfig,
    EngineConfig,
    EnvConfig,
    LoraSettings,
    Message,
    ModelConfig,
    PopulationConfig,
    RecordConfig,
)
from evo_grpo.config.run import RunConfig, warnings

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
