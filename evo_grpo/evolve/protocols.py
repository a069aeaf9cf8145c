"""The protocols of selections and explorations, with their arguments and results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from evo_grpo.errors import RunFailedError
from evo_grpo.schema.hparams import Hparams, Value
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.types import Position, Score

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Offspring:
    """One agent of the next round.

    Attributes:
        position: The position that it takes.
        parent: Position of the agent whose weights it gets; equal to `position` for a survivor.
        elite: Whether it is the best agent, which always stays.
    """

    position: Position
    parent: Position
    elite: bool = False


class Selector(Protocol):
    """Plans the next round from the fitness of the current round.

    A class may also declare `copies = False` if it copies no agent, `selects = False` if all agents
    stay, `by_lot = True` if it draws agents at random, and a method `at(significance)` that returns
    a selector whose tests have this level of significance. A field `size` is the number of agents
    of a tournament.

    A plan refers to agents by their positions in this round, 0 to len(histories) - 1. Parents must
    survive at their positions, so that copies can be made in any order. An agent whose position no
    offspring takes leaves the population.
    """

    def plan(
        self, histories: Sequence[Sequence[Score]], places: int, rng: np.random.Generator
    ) -> tuple[Offspring, ...]:
        """Return the agents of the next round, in ascending order of position.

        Args:
            histories: By position, the scores to compare, latest last; empty for a failed agent.
            places: Maximum number of agents in the next round, 1 to len(histories).
            rng: Stream of all draws: equal streams give equal plans.

        Raises:
            RunFailedError: Every agent has failed.
        """
        ...


def rank(histories: Sequence[Sequence[Score]]) -> list[Position]:
    """Return the positions of the agents that have not failed, ordered by mean score, best first.

    Ties are ordered by position. An agent has failed if it has no scores or one that is not finite.
    """
    means: dict[Position, float] = {}
    for position, history in enumerate(histories):
        scores = [score.mean for score in history]
        if scores and all(math.isfinite(score) for score in scores):
            means[Position(position)] = math.fsum(scores) / len(scores)
    if not means:
        raise RunFailedError(
            "selection: expected at least one agent with a finite fitness, got none of "
            f"{len(histories)}; look at the reasons in rounds.jsonl (often lr or beta is too high) "
            "and start again with a smaller range"
        )
    return sorted(means, key=lambda position: (-means[position], position))


def best(histories: Sequence[Sequence[Score]], places: int) -> list[Position]:
    """Return the positions of the `places` best agents, ascending; failed agents rank last."""
    ranking = rank(histories)
    failed = sorted({Position(position) for position in range(len(histories))} - set(ranking))
    return sorted([*ranking, *failed][:places])


Changes = dict[str, tuple[Value, Value]]
"""Name of a hyperparameter -> (old, new)."""


@dataclass(frozen=True)
class Trial:
    """The hyperparameters of an agent in a finished round (0-based), and its fitness then.

    The fitness is the mean evaluation reward; NaN for a failed agent.
    """

    hparams: Hparams
    fitness: float
    round: int


@dataclass(frozen=True)
class Candidate:
    """One agent of the next round, before its hyperparameters vary.

    Attributes:
        hparams: Hyperparameters of the agent whose weights it gets.
        copied: Whether it is a copy of another agent; otherwise it survived.
        elite: Whether it is the best agent, which always stays.
        trials: All agents of all finished rounds so far, for an exploration that learns from them.
        round: The next round (0-based).
        twin: Whether another agent of the next round keeps the same hyperparameters, so that this
            agent is free to try other values; always true for a copy.
        shares: Numbers in (0, 1]: one for each hyperparameter that may change, and one more for the
            second end of a clip range. The twins with these hyperparameters get the rows of one
            Latin hypercube, so that their numbers are spread evenly. Empty unless `twin`.
    """

    hparams: Hparams
    copied: bool = False
    elite: bool = False
    trials: Sequence[Trial] = ()
    round: int = 0
    twin: bool = False
    shares: Sequence[float] = ()


class Explorer(Protocol):
    """Varies the hyperparameters of the agents that a selection planned.

    A class may declare `copies_only = True` if survivors keep their values, and `scheduled = True`
    if its values follow a schedule by round. A method `check(first, hp_config)`, if the class has
    it, is called before a run with the hyperparameters of agent 0, and raises the ConfigError that
    `explore` would raise. A method `problems`, with the same arguments, yields the problems that
    can be found from the settings alone.
    """

    def explore(
        self, candidate: Candidate, hp_config: HyperparameterConfig, rng: np.random.Generator
    ) -> Hparams:
        """Return an agent's new hyperparameters, or `candidate.hparams` if none changes.

        Args:
            candidate: The agent.
            hp_config: Hyperparameters that may change, with their ranges.
            rng: Stream of all draws: equal streams give equal values.
        """
        ...
