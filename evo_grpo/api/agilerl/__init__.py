"""The classes of this package with AgileRL's names, positions, defaults and extra parameters.

A script for AgileRL only changes its imports to this module. Names are loaded on first use, so that
importing the module does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evo_grpo.api.agilerl.agent import CISPO as CISPO
    from evo_grpo.api.agilerl.agent import GRPO as GRPO
    from evo_grpo.api.agilerl.agent import GSPO as GSPO
    from evo_grpo.api.agilerl.configs import CosineLRScheduleConfig as CosineLRScheduleConfig
    from evo_grpo.api.agilerl.configs import VLLMConfig as VLLMConfig
    from evo_grpo.api.agilerl.evolution import Mutations as Mutations
    from evo_grpo.api.agilerl.evolution import TournamentSelection as TournamentSelection
    from evo_grpo.api.agilerl.finetune import finetune_llm_multiturn as finetune_llm_multiturn
    from evo_grpo.api.agilerl.finetune import finetune_llm_reasoning as finetune_llm_reasoning
    from evo_grpo.api.agilerl.finetune import save_llm_checkpoint as save_llm_checkpoint
    from evo_grpo.api.agilerl.gym import HuggingFaceGym as HuggingFaceGym
    from evo_grpo.api.agilerl.gym import ReasoningGym as ReasoningGym
    from evo_grpo.envs.episodes.gym import MultiTurnGym as MultiTurnGym
    from evo_grpo.envs.episodes.multi_turn import TokenObservationWrapper as TokenObservationWrapper
    from evo_grpo.schema.search_space import HyperparameterConfig as HyperparameterConfig
    from evo_grpo.schema.search_space import RLParameter as RLParameter

_HOME = {
    "CISPO": "evo_grpo.api.agilerl.agent",
    "GRPO": "evo_grpo.api.agilerl.agent",
    "GSPO": "evo_grpo.api.agilerl.agent",
    "CosineLRScheduleConfig": "evo_grpo.api.agilerl.configs",
    "HuggingFaceGym": "evo_grpo.api.agilerl.gym",
    "HyperparameterConfig": "evo_grpo.schema.search_space",
    "MultiTurnGym": "evo_grpo.envs.episodes.gym",
    "Mutations": "evo_grpo.api.agilerl.evolution",
    "RLParameter": "evo_grpo.schema.search_space",
    "ReasoningGym": "evo_grpo.api.agilerl.gym",
    "TokenObservationWrapper": "evo_grpo.envs.episodes.multi_turn",
    "TournamentSelection": "evo_grpo.api.agilerl.evolution",
    "VLLMConfig": "evo_grpo.api.agilerl.configs",
    "finetune_llm_multiturn": "evo_grpo.api.agilerl.finetune",
    "finetune_llm_reasoning": "evo_grpo.api.agilerl.finetune",
    "save_llm_checkpoint": "evo_grpo.api.agilerl.finetune",
}

__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll] -- the names are imported above


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
