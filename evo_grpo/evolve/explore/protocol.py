"""What an exploration is given and returns, and how it is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from evo_grpo.schema.hparams import Hparams
    from evo_grpo.schema.search_space import HyperparameterConfig

Changes = dict[str, tuple[float, float]]
"""Name of a hyperparameter -> (old, new)."""


@dataclass(frozen=True)
class Candidate:
    """One agent of the next round, before anything about it has varied.

    Attributes:
        hparams: Those of the agent it comes from.
        copied: Whether it is a copy of another agent; otherwise it survived itself.
        elite: Whether it is the best agent, kept whatever the draws said.
    """

    hparams: Hparams
    copied: bool = False
    elite: bool = False


class Explorer(Protocol):
    """Varies the hyperparameters of the agents that a selection left."""

    def explore(
        self, candidate: Candidate, hp_config: HyperparameterConfig, rng: np.random.Generator
    ) -> tuple[Hparams, Changes]:
        """Return what an agent trains with in the next round, and what changed.

        Args:
            candidate: The agent.
            hp_config: Which hyperparameters may change, within which bounds.
            rng: The stream of all draws: equal streams give equal values.

        Returns:
            The new hyperparameters and `{name: (old, new)}`; those of the candidate and `{}` where
            nothing changed.
        """
        ...
