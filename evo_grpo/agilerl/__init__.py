"""AgileRL's names, positions, defaults and extra parameters over this package's own classes.

Scripts written for AgileRL change their imports to this module. The names load on first use, so
that importing it pulls in no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evo_grpo.agilerl.agent import CISPO, GRPO, GSPO
    from evo_grpo.agilerl.configs import CosineLRScheduleConfig, VLLMConfig
    from evo_grpo.agilerl.evolution import Mutations, TournamentSelection
    from evo_grpo.agilerl.finetune import (
        finetune_llm_multiturn,
        finetune_llm_reasoning,
        save_llm_checkpoint,
    )
    from evo_grpo.agilerl.gym import HuggingFaceGym, ReasoningGym
    from evo_grpo.envs.episodes.gym import MultiTurnGym
    from evo_grpo.envs.episodes.multi_turn import TokenObservationWrapper
    from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

_HOME = {
    "CISPO": "evo_grpo.agilerl.agent",
    "CosineLRScheduleConfig": "evo_grpo.agilerl.configs",
    "GRPO": "evo_grpo.agilerl.agent",
    "GSPO": "evo_grpo.agilerl.agent",
    "HuggingFaceGym": "evo_grpo.agilerl.gym",
    "HyperparameterConfig": "evo_grpo.schema.search_space",
    "MultiTurnGym": "evo_grpo.envs.episodes.gym",
    "Mutations": "evo_grpo.agilerl.evolution",
    "RLParameter": "evo_grpo.schema.search_space",
    "ReasoningGym": "evo_grpo.agilerl.gym",
    "TokenObservationWrapper": "evo_grpo.envs.episodes.multi_turn",
    "TournamentSelection": "evo_grpo.agilerl.evolution",
    "VLLMConfig": "evo_grpo.agilerl.configs",
    "finetune_llm_multiturn": "evo_grpo.agilerl.finetune",
    "finetune_llm_reasoning": "evo_grpo.agilerl.finetune",
    "save_llm_checkpoint": "evo_grpo.agilerl.finetune",
}

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


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- whatever the name stands for
    if name not in _HOME:
        raise AttributeError(
            f"module 'evo_grpo.agilerl' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]
