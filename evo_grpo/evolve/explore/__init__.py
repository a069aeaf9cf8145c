"""How the hyperparameters of the next round vary: one file per exploration."""

from evo_grpo.evolve.explore.protocol import Explorer
from evo_grpo.evolve.explore.registry import Exploration

__all__ = ["Exploration", "Explorer"]
