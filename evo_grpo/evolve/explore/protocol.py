"""What an exploration is given and returns, and how it is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from evo_grpo.schema.hparams import Hparams
    from evo_grpo.schema.search_space import HyperparameterConfig

Changes = dict[str, tuple[float, float]]
"""Name of a hyperparameter -> (old, new)."""


@dataclass(frozen=True)
class Trial:
    """What one agent trained with in one finished round, and how fit it was after it.

    Attributes:
        hparams: What it trained with.
        fitness: Its mean evaluation reward of that round; NaN for a failed agent.
        round: The round (0-based).
    """

    hparams: Hparams
    fitness: float
    round: int


@dataclass(frozen=True)
class Candidate:
    """One agent of the next round, before anything about it has varied.

    Attributes:
        hparams: Those of the agent it comes from.
        copied: Whether it is a copy of another agent; otherwise it survived itself.
        elite: Whether it is the best agent, kept whatever the draws said.
        trials: All agents of all finished rounds so far, for an exploration that learns from them.
    """

    hparams: Hparams
    copied: bool = False
    elite: bool = False
    trials: Sequence[Trial] = ()


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
