"""An evolving population of GRPO agents over one shared language model.

The public names load on first use, so that `import evo_grpo` costs nothing and pulls in no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evo_grpo.agilerl.finetune import (
        finetune_llm_multiturn,
        finetune_llm_reasoning,
        save_llm_checkpoint,
    )
    from evo_grpo.agilerl.gym import HuggingFaceGym
    from evo_grpo.api.agent import CISPO, GRPO, GSPO
    from evo_grpo.api.population import Population
    from evo_grpo.cohort.settings import VLLMConfig
    from evo_grpo.envs.episodes.gym import MultiTurnGym
    from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv, TokenObservationWrapper
    from evo_grpo.envs.single_turn import ReasoningGym
    from evo_grpo.evolve.mutate import Mutations
    from evo_grpo.evolve.select import TournamentSelection
    from evo_grpo.objective.lr_schedule import CosineLRScheduleConfig
    from evo_grpo.record.leaderboard import leaderboard
    from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
    from evo_grpo.settings import RunConfig
    from evo_grpo.training import resume, run

__version__ = "0.1.0"

_HOME = {
    "CISPO": "evo_grpo.api.agent",
    "CosineLRScheduleConfig": "evo_grpo.objective.lr_schedule",
    "GRPO": "evo_grpo.api.agent",
    "GSPO": "evo_grpo.api.agent",
    "HuggingFaceGym": "evo_grpo.agilerl.gym",
    "HyperparameterConfig": "evo_grpo.schema.hparams",
    "MultiTurnEnv": "evo_grpo.envs.episodes.multi_turn",
    "MultiTurnGym": "evo_grpo.envs.episodes.gym",
    "Mutations": "evo_grpo.evolve.mutate",
    "Observer": "evo_grpo.record.observer",
    "Population": "evo_grpo.api.population",
    "RLParameter": "evo_grpo.schema.hparams",
    "ReasoningGym": "evo_grpo.envs.single_turn",
    "RunConfig": "evo_grpo.settings",
    "TokenObservationWrapper": "evo_grpo.envs.episodes.multi_turn",
    "TournamentSelection": "evo_grpo.evolve.select",
    "VLLMConfig": "evo_grpo.cohort.settings",
    "finetune_llm_multiturn": "evo_grpo.agilerl.finetune",
    "finetune_llm_reasoning": "evo_grpo.agilerl.finetune",
    "history": "evo_grpo.record.history",
    "leaderboard": "evo_grpo.record.leaderboard",
    "resume": "evo_grpo.training",
    "run": "evo_grpo.training",
    "save_llm_checkpoint": "evo_grpo.agilerl.finetune",
}

__all__ = [
    "CISPO",
    "GRPO",
    "GSPO",
    "CosineLRScheduleConfig",
    "HuggingFaceGym",
    "HyperparameterConfig",
    "MultiTurnEnv",
    "MultiTurnGym",
    "Mutations",
    "Observer",
    "Population",
    "RLParameter",
    "ReasoningGym",
    "RunConfig",
    "TokenObservationWrapper",
    "TournamentSelection",
    "VLLMConfig",
    "finetune_llm_multiturn",
    "finetune_llm_reasoning",
    "history",
    "leaderboard",
    "resume",
    "run",
    "save_llm_checkpoint",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- whatever the name stands for
    if name not in _HOME:
        raise AttributeError(
            f"module 'evo_grpo' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
