"""Drops the copies and removals of a plan that a paired test does not support."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evo_grpo.evolve.compare import Comparison
from evo_grpo.evolve.goals import ahead, ranked
from evo_grpo.evolve.protocols import Offspring
from evo_grpo.types import Position, Score


@dataclass(frozen=True)
class TestedPlan:
    """A plan and the comparisons that it is based on.

    Attributes:
        plan: The agents of the next round, in ascending order of position.
        copies: Overwritten position -> how far its new parent is ahead; None if the overwritten
            agent has no fitness.
        kept: Position whose planned copy was dropped -> the planned parent, and how far it is
            ahead, which is not significant.
        left: Position that leaves -> the weakest agent that stays, and how far it is ahead; None
            if the agent that leaves has no fitness.
    """

    plan: tuple[Offspring, ...]
    copies: Mapping[Position, Comparison | None]
    kept: Mapping[Position, tuple[Position, Comparison]]
    left: Mapping[Position, tuple[Position, Comparison] | None]


def drop_unsupported(
    plan: Sequence[Offspring], scores: Sequence[Score | None], level: float | None
) -> TestedPlan:
    """Return a plan without the copies and removals that a paired test does not support.

    Each planned copy overwrites the best agent that does not survive in the plan, but only if its
    parent is significantly better. Then an agent that would leave replaces a significantly worse
    agent that would stay. With several goals, an agent is better if it dominates (see
    `evolve.goals`), and each copy overwrites the agent that the plan names.

    `scores` are by position; None is an agent that cannot be ranked, which is overwritten without a
    test. `level` is the largest p-value of a significant difference; None keeps the plan.
    """
    parents = {offspring.position: offspring.parent for offspring in plan}
    elites = {offspring.position for offspring in plan if offspring.elite}
    dropped: dict[Position, tuple[Position, Comparison]] = {}
    if level is not None:
        parents, dropped = _supported(parents, elites, scores, level)
    new = tuple(
        Offspring(position, parents[position], position in elites) for position in sorted(parents)
    )
    copies = {
        position: _compared(scores, parent, position, level)
        for position, parent in parents.items()
        if position != parent
    }
    return TestedPlan(new, copies, dropped, _left(parents, scores, level))


def _supported(
    planned: Mapping[Position, Position],
    elites: set[Position],
    scores: Sequence[Score | None],
    level: float,
) -> tuple[dict[Position, Position], dict[Position, tuple[Position, Comparison]]]:
    survivors = {position for position, parent in planned.items() if position == parent}
    order = ranked(scores, level)
    several = any(score is not None and score.further for score in scores)
    waiting = [position for position in order if position not in survivors]
    positions = map(Position, range(len(scores)))
    unranked = [p for p in positions if p not in survivors and p not in order]
    parents = {position: position for position in survivors}
    dropped: dict[Position, tuple[Position, Comparison]] = {}
    for target, parent in planned.items():
        if target == parent:
            continue
        if several:
            position = target
            waiting = [p for p in waiting if p != target]
        elif not waiting:
            # Only agents that cannot be ranked are left to be overwritten.
            parents[unranked.pop(0)] = parent
            continue
        else:
            position = waiting.pop(0)
        lead = _compared(scores, parent, position, level)
        if lead is None or lead.significant(level):
            parents[position] = parent
        else:
            parents[position] = position
            survivors.add(position)
            dropped[position] = (parent, lead)
    # Agents that would leave take the places of significantly worse ones that stay.
    parents_of_copies = {parent for position, parent in parents.items() if position != parent}
    movable = [p for p in reversed(order) if p in survivors - elites - parents_of_copies]
    for weak, strong in zip(movable, waiting, strict=False):
        lead = _compared(scores, strong, weak, level)
        if lead is None or not lead.significant(level):
            break
        del parents[weak]
        dropped.pop(weak, None)
        parents[strong] = strong
    return parents, dropped


def _left(
    parents: Mapping[Position, Position], scores: Sequence[Score | None], level: float | None
) -> dict[Position, tuple[Position, Comparison] | None]:
    staying = [position for position in ranked(scores, level) if parents.get(position) == position]
    leaving: dict[Position, tuple[Position, Comparison] | None] = {}
    for number in range(len(scores)):
        position = Position(number)
        if position in parents:
            continue
        lead = _compared(scores, staying[-1], position, level) if staying else None
        leaving[position] = None if lead is None else (staying[-1], lead)
    return leaving


def _compared(
    scores: Sequence[Score | None], first: Position, second: Position, level: float | None
) -> Comparison | None:
    score, other = scores[first], scores[second]
    return None if score is None or other is None else ahead(score, other, level)
