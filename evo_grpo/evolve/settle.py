"""A plan, checked against chance: what a paired test cannot separate is neither copied nor lost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evo_grpo.evolve.compare import Comparison, compare
from evo_grpo.evolve.select.protocol import Offspring
from evo_grpo.types import Position

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from evo_grpo.types import Score


@dataclass(frozen=True)
class Settled:
    """A plan, and the comparisons that it rests on.

    Attributes:
        plan: The agents of the next round, by rising position.
        copies: Position that is overwritten -> how far its new parent is ahead of it; None where
            the agent that is overwritten has no fitness.
        kept: Position that a copy was planned for -> the planned parent, and how far that is ahead:
            not far enough.
        left: Position without a place in the next round -> the weakest agent that keeps one, and
            how far that is ahead; None where the agent that left has no fitness.
    """

    plan: tuple[Offspring, ...]
    copies: Mapping[Position, Comparison | None]
    kept: Mapping[Position, tuple[Position, Comparison]]
    left: Mapping[Position, tuple[Position, Comparison] | None]


def settle(
    plan: Sequence[Offspring], scores: Sequence[Score | None], level: float | None
) -> Settled:
    """Keep what a selection planned only where the agents can be told apart.

    A copy goes to the best agent that the plan does not let survive. Where its parent is not
    significantly better than that agent, the agent stays as it is, in the copy's place. And nobody
    leaves who is significantly better than an agent that stays.

    Scores are the latest fitness by position, None for an agent that cannot be ranked, which is
    overwritten without a test. A difference counts up to the p-value `level`; None leaves the plan
    as it is.
    """
    parents = {offspring.position: offspring.parent for offspring in plan}
    elites = {offspring.position for offspring in plan if offspring.elite}
    kept: dict[Position, tuple[Position, Comparison]] = {}
    if level is not None:
        parents, kept = _without_chance(parents, elites, scores, level)
    new = tuple(
        Offspring(position, parents[position], position in elites) for position in sorted(parents)
    )
    copies = {
        position: _compared(scores, parent, position)
        for position, parent in parents.items()
        if position != parent
    }
    return Settled(new, copies, kept, _left(parents, scores))


def _without_chance(
    planned: Mapping[Position, Position],
    elites: set[Position],
    scores: Sequence[Score | None],
    level: float,
) -> tuple[dict[Position, Position], dict[Position, tuple[Position, Comparison]]]:
    survivors = {position for position, parent in planned.items() if position == parent}
    order = _ranked(scores)
    waiting = [position for position in order if position not in survivors]
    every = map(Position, range(len(scores)))
    unranked = [p for p in every if p not in survivors and p not in order]
    parents = {position: position for position in survivors}
    kept: dict[Position, tuple[Position, Comparison]] = {}
    for parent in (parent for position, parent in planned.items() if position != parent):
        if not waiting:
            # Only agents that cannot be ranked are left to be overwritten.
            parents[unranked.pop(0)] = parent
            continue
        position = waiting.pop(0)
        found = _compared(scores, parent, position)
        if found is None or found.significant(level):
            parents[position] = parent
        else:
            parents[position] = position
            survivors.add(position)
            kept[position] = (parent, found)
    # Nobody leaves who is better than one that stays.
    parents_of_copies = {parent for position, parent in parents.items() if position != parent}
    movable = [p for p in reversed(order) if p in survivors - elites - parents_of_copies]
    for weak, strong in zip(movable, waiting, strict=False):
        found = _compared(scores, strong, weak)
        if found is None or not found.significant(level):
            break
        del parents[weak]
        kept.pop(weak, None)
        parents[strong] = strong
    return parents, kept


def _left(
    parents: Mapping[Position, Position], scores: Sequence[Score | None]
) -> dict[Position, tuple[Position, Comparison] | None]:
    staying = [position for position in _ranked(scores) if parents.get(position) == position]
    left: dict[Position, tuple[Position, Comparison] | None] = {}
    for number in range(len(scores)):
        position = Position(number)
        if position in parents:
            continue
        found = _compared(scores, staying[-1], position) if staying else None
        left[position] = None if found is None else (staying[-1], found)
    return left


def _ranked(scores: Sequence[Score | None]) -> list[Position]:
    """Return the positions that can be ranked, best first; the lower one of equals."""
    means = {
        Position(number): score.mean
        for number, score in enumerate(scores)
        if score is not None and math.isfinite(score.mean)
    }
    return sorted(means, key=lambda position: (-means[position], position))


def _compared(
    scores: Sequence[Score | None], first: Position, second: Position
) -> Comparison | None:
    one, other = scores[first], scores[second]
    return None if one is None or other is None else compare(one, other)
