"""The schema of population.yaml and of the Python classes: frozen groups of settings, no torch."""

from evo_grpo.settings.algorithm import AlgorithmConfig, LossConfig, LRSchedule
from evo_grpo.settings.cross_checks import DoubtfulSetting
from evo_grpo.settings.engine import EngineConfig
from evo_grpo.settings.engines.vllm import VLLMSettings
from evo_grpo.settings.env import EnvConfig, Message
from evo_grpo.settings.evolve import EvolveConfig, FitnessConfig
from evo_grpo.settings.model import LoraSettings, ModelConfig
from evo_grpo.settings.population import PopulationConfig, StopConfig
from evo_grpo.settings.record import RecordConfig
from evo_grpo.settings.run import AgentSettings, RunConfig, warnings
from evo_grpo.settings.templates import template
from evo_grpo.settings.without_effect import WithoutEffect
from evo_grpo.settings.yaml import from_dict, json_schema, load, to_yaml

__all__ = [
    "AgentSettings",
    "AlgorithmConfig",
    "DoubtfulSetting",
    "EngineConfig",
    "EnvConfig",
    "EvolveConfig",
    "FitnessConfig",
    "LRSchedule",
    "LoraSettings",
    "LossConfig",
    "Message",
    "ModelConfig",
    "PopulationConfig",
    "RecordConfig",
    "RunConfig",
    "StopConfig",
    "VLLMSettings",
    "WithoutEffect",
    "from_dict",
    "json_schema",
    "load",
    "template",
    "to_yaml",
    "warnings",
]
