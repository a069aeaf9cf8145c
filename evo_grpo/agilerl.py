"""Classes and functions with AgileRL's names, parameters, order of parameters and defaults.

A script for AgileRL only changes its imports to this module; the code is in `evo_grpo.api.agilerl`.
"""

from evo_grpo.api.agilerl.algorithms import CISPO, GRPO, GSPO
from evo_grpo.api.agilerl.arguments import CosineLRScheduleConfig, VLLMConfig
from evo_grpo.api.agilerl.evolution import Mutations, TournamentSelection
from evo_grpo.api.agilerl.finetune import (
    HuggingFaceGym,
    ReasoningGym,
    finetune_llm_multiturn,
    finetune_llm_reasoning,
    save_llm_checkpoint,
)
from evo_grpo.envs.episodes.gym import MultiTurnGym
from evo_grpo.envs.episodes.multi_turn import TokenObservationWrapper
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

__all__ = [
    "CISPO",
    "GRPO",
    "GSPO",
    "CosineLRScheduleConfig",
    "HuggingFaceGym",
    "HyperparameterConfig",
    "MultiTurnGym",
    "Mutations",
    "RLParameter",
    "ReasoningGym",
    "TokenObservationWrapper",
    "TournamentSelection",
    "VLLMConfig",
    "finetune_llm_multiturn",
    "finetune_llm_reasoning",
    "save_llm_checkpoint",
]
