"""Pareto selection: agents that no other agent dominates stay."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, final

from evo_grpo.evolve.protocols import Offspring, rank
from evo_grpo.schema.group import Group, setting
from evo_grpo.types import Position, Score

if TYPE_CHECKING:
    import numpy as np


@final
class ParetoSelection(Group):
    """Agents are ordered by non-dominated sorting and crowding distance, as in NSGA-II.

    See Deb et al. (2002); here, dominance uses paired tests. An agent dominates another if it is
    significantly better in one objective of `evolve.fitness.objectives`, at the level
    `evolve.significance`, and worse in none. If the next round has fewer places, the first agents
    in the order stay. The agents of the first front keep their weights. Each other agent is
    overwritten by a copy of an agent of the first front, if agents of that front dominate it:
    `size` of these are drawn at random, and the first of them in the order is copied. Explorations
    do not change the agents that are best in an objective.
    """

    several_goals: ClassVar[bool] = True  # it needs `evolve.fitness.objectives`
    kind: Literal["pareto"] = setting(
        "pareto", "The agents that no other dominates stay, and are copied over dominated ones."
    )
    size: int = setting(
        2, "Agents of the front that are drawn for a copy; the one with most room is copied.", ge=1
    )

    def plan(
        self, histories: Sequence[Sequence[Score]], places: int, rng: "np.random.Generator"
    ) -> tuple[Offspring, ...]:
        """Plan the next round by means, without tests; `at` returns a selector with tests."""
        return self.at(None).plan(histories, places, rng)

    def at(self, level: float | None) -> "ParetoSelector":
        """Return the selector whose tests have this level, `evolve.significance`."""
        return ParetoSelector(self.size, level)


@dataclass(frozen=True)
class ParetoSelector:
    """`ParetoSelection` whose tests have significance `level`; if None, means are compared."""

    size: int
    level: float | None

    def plan(
        self, histories: Sequence[Sequence[Score]], places: int, rng: "np.random.Generator"
    ) -> tuple[Offspring, ...]:
        """Plan the next round; copies from the front overwrite failed agents."""
        from evo_grpo.evolve.goals import dominates, ranked  # loads numpy, which settings do not

        usable = set(rank(histories))
        score_of = {
            position: _score(histories[position])
            for position in map(Position, range(len(histories)))
            if position in usable
        }
        scores = [score_of.get(Position(position)) for position in range(len(histories))]
        order = ranked(scores, self.level)
        front = self._front(score_of, order[0])
        staying = [position for position in order[:places] if position in front]
        parents = {position: position for position in staying}
        for position in order[len(staying) : places]:
            above = [p for p in staying if dominates(score_of[p], score_of[position], self.level)]
            parents[position] = self._drawn(above, rng) if above else position
        failed = [p for p in map(Position, range(len(histories))) if p not in score_of]
        for position in failed[: max(0, places - len(order))]:
            parents[position] = self._drawn(staying, rng)
        ends = _ends({position: score_of[position] for position in staying})
        return tuple(
            Offspring(position, parents[position], position in ends) for position in sorted(parents)
        )

    def _front(self, known: Mapping[Position, Score], first: Position) -> set[Position]:
        """Return the positions of the first front; `first` is the position of the best agent."""
        from evo_grpo.evolve.goals import dominates, fronts

        if not known[first].further:  # one goal: without a comparison of all pairs
            return {p for p in known if not dominates(known[first], known[p], self.level)}
        positions = list(known)
        return {positions[index] for index in fronts(list(known.values()), self.level)[0]}

    def _drawn(self, among: Sequence[Position], rng: "np.random.Generator") -> Position:
        """Return the best of `size` agents drawn from `among`, which are ordered best first."""
        size = min(self.size, len(among))
        return among[int(rng.choice(len(among), size=size, replace=False).min())]


def _score(history: Sequence[Score]) -> Score:
    """Return the latest score in `history`, with its mean replaced by the mean over `history`."""
    if len(history) == 1:
        return history[0]
    return replace(history[-1], mean=math.fsum(score.mean for score in history) / len(history))


def _ends(front: Mapping[Position, Score]) -> set[Position]:
    """Return the position of the best agent of a front in each goal; of equals, the lowest."""
    goals = range(min(len(score.goals) for score in front.values()))
    return {
        min(front, key=lambda position: (-front[position].goals[goal].mean, position))
        for goal in goals
    }
