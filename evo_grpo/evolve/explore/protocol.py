"""The protocol of an exploration, and the types of its argument and result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from evo_grpo.schema.hparams import Value

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from evo_grpo.schema.hparams import Hparams
    from evo_grpo.schema.search_space import HyperparameterConfig

Changes = dict[str, tuple[Value, Value]]
"""Name of a hyperparameter -> (old, new)."""


@dataclass(frozen=True)
class Trial:
    """The hyperparameters of one agent in one finished round (0-based), and its fitness after it.

    The fitness is the mean evaluation reward; NaN for a failed agent.
    """

    hparams: Hparams
    fitness: float
    round: int


@dataclass(frozen=True)
class Candidate:
    """One agent of the next round, before its hyperparameters vary.

    Attributes:
        hparams: Hyperparameters of the agent it comes from.
        copied: Whether it is a copy of another agent; otherwise it survived.
        elite: Whether it is the best agent, which stays independently of all draws.
        trials: All agents of all finished rounds so far, for an exploration that learns from them.
        round: The round that the agent plays next (0-based).
        twin: Whether another agent of the next round keeps the same hyperparameters, so that this
            one is free to try others; always true for a copy.
        shares: Numbers in (0, 1], one for each hyperparameter that may change, spread evenly over
            the twins of one agent (a Latin hypercube); empty for an agent without twins.
    """

    hparams: Hparams
    copied: bool = False
    elite: bool = False
    trials: Sequence[Trial] = ()
    round: int = 0
    twin: bool = False
    shares: Sequence[float] = ()


class Explorer(Protocol):
    """Varies the hyperparameters of the agents that a selection planned."""

    def explore(
        self, candidate: Candidate, hp_config: HyperparameterConfig, rng: np.random.Generator
    ) -> tuple[Hparams, Changes]:
        """Return an agent's new hyperparameters, and their changes as `{name: (old, new)}`.

        Args:
            candidate: The agent.
            hp_config: Hyperparameters that may change, with their ranges.
            rng: Stream of all draws: equal streams give equal values.
        """
        ...
