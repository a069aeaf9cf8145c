"""The order of the agents by fitness."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from evo_grpo.errors import RunFailedError
from evo_grpo.types import Position

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evo_grpo.types import Score


def rank(histories: Sequence[Sequence[Score]]) -> list[Position]:
    """Order the agents that have not failed by their mean scores, best first.

    The lower position comes first among equals. An agent without a score, or with one that is not
    finite, counts as failed.

    Raises:
        RunFailedError: When every agent has failed.
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
    """Return the positions of the best agents, as many as there are places, rising.

    Failed agents come after all others, the one with the highest position last.

    Raises:
        RunFailedError: When every agent has failed.
    """
    ranked = rank(histories)
    failed = sorted({Position(position) for position in range(len(histories))} - set(ranked))
    return sorted([*ranked, *failed][:places])
