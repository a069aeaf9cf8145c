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
    """Return the positions of the agents that have not failed by mean score, best first.

    Ties are ordered by position. An agent without a finite score counts as failed.
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
    """Return the positions of the `places` best agents, failed ones last, in ascending order."""
    ranked = rank(histories)
    failed = sorted({Position(position) for position in range(len(histories))} - set(ranked))
    return sorted([*ranked, *failed][:places])
