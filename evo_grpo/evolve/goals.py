"""Orders agents by several goals: dominance, fronts and crowding (NSGA-II).

This is the method of Deb et al. (2002), A Fast and Elitist Multiobjective Genetic Algorithm, with
the paired test in place of a comparison of means. With one goal, agents are ordered by their means.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from evo_grpo.evolve.compare import Comparison, compare
from evo_grpo.types import Position, Score


def dominates(first: Score, second: Score, level: float | None) -> bool:
    """Return whether the first agent is worse in no goal and significantly better in one.

    `level`, the largest p-value of a significant difference, is not divided among the goals; None
    counts every difference of means. A worse mean counts without a test, because a copy destroys
    the agent that it overwrites.
    """
    pairs = list(zip(first.goals, second.goals, strict=False))
    return all(goal.mean >= other.mean for goal, other in pairs) and any(
        _better(goal, other, level) for goal, other in pairs
    )


def ahead(first: Score, second: Score, level: float | None) -> Comparison:
    """Return how far the first agent is ahead of the second, by a paired comparison.

    With one goal, fitness is compared. With several, the goal with the least p-value is compared if
    the first agent dominates the second; otherwise fitness is compared, and the p-value is 1.
    """
    fitness = compare(first, second)
    if not first.further:
        return fitness
    if not dominates(first, second, level):
        return replace(fitness, p=1.0)
    compared = [fitness] + [
        replace(compare(objective.upward, other.upward), objective=objective.name)
        for objective, other in zip(first.further, second.further, strict=False)
    ]
    better = [comparison for comparison in compared if comparison.difference > 0]
    return min(better, key=lambda comparison: comparison.p, default=fitness)


def fronts(scores: Sequence[Score], level: float | None) -> list[list[int]]:
    """Divide scores into fronts, and return the indices of each; the best front is first.

    Indices in a front ascend. Agents on a front are dominated only by agents of the fronts before
    it. Dominance by tests is not transitive, but has no cycles: along a chain, no mean gets worse
    and one gets better.
    """
    count = len(scores)
    above = np.zeros((count, count), dtype=bool)
    for i, score in enumerate(scores):
        for j, other in enumerate(scores):
            above[i, j] = i != j and dominates(score, other, level)
    ordered: list[list[int]] = []
    remaining = np.arange(count)
    while len(remaining):
        below = above[np.ix_(remaining, remaining)].any(axis=0)
        assert not below.all(), "dominance has no circles"
        ordered.append([int(index) for index in remaining[~below]])
        remaining = remaining[below]
    return ordered


def crowding(scores: Sequence[Score]) -> list[float]:
    """Return the crowding distance of each agent of a front.

    The crowding distance is the sum over goals of the distance between the agent's two neighbours
    in that goal, divided by the range of that goal on the front. It is infinite for the ends of a
    front, so the ends come first.
    """
    distances = [0.0] * len(scores)
    for values in zip(*(tuple(goal.mean for goal in score.goals) for score in scores), strict=True):
        order = sorted(range(len(values)), key=lambda index: (values[index], index))
        span = values[order[-1]] - values[order[0]]
        distances[order[0]] = distances[order[-1]] = math.inf
        if span <= 0:
            continue
        for before, index, after in zip(order, order[1:], order[2:], strict=False):
            distances[index] += (values[after] - values[before]) / span
    return distances


def ranked(scores: Sequence[Score | None], level: float | None) -> list[Position]:
    """Return the positions of agents that can be ranked, best first.

    With one goal, they are ordered by mean; with several, by front, crowding distance, fitness.
    Ties are ordered by position. An agent without a finite score is left out.
    """
    finite = {Position(p): s for p, s in enumerate(scores) if s is not None and s.is_finite}
    if not any(score.further for score in finite.values()):
        return sorted(finite, key=lambda position: (-finite[position].mean, position))
    positions = list(finite)
    order: list[Position] = []
    for front in fronts(list(finite.values()), level):
        on_front = [positions[index] for index in front]
        room = dict(zip(on_front, crowding([finite[p] for p in on_front]), strict=True))
        order += sorted(on_front, key=lambda p: (-room[p], -finite[p].mean, p))
    return order


def best_first(score: Score) -> tuple[float, ...]:
    """Return a sort key, best first: fitness, then, for equal fitness, the other objectives."""
    return tuple(-goal.mean for goal in score.goals)


def _better(score: Score, other: Score, level: float | None) -> bool:
    return score.mean > other.mean if level is None else compare(score, other).significant(level)
