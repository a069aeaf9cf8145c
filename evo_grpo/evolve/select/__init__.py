"""Who survives a round, and whose copies fill the other places: one file per selection."""

from evo_grpo.evolve.select.protocol import Selector
from evo_grpo.evolve.select.registry import Selection

__all__ = ["Selection", "Selector"]
