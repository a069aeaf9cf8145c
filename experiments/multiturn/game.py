"""A game of two turns for the embedded model tiny-sums: add, then say the middle digit of the sum.

    environment  37+25=
    policy       062
    environment  ?
    policy       6

Each right answer earns 1. A wrong one ends the episode, so the second question is met, and can be
learned, only by a policy that gets there; the answer to it stands in the policy's own words, one
turn earlier.
"""

from __future__ import annotations

import random
from typing import Any


class MiddleDigit:
    """The game, for one player.

    Args:
        low: Least summand.
        high: Greatest summand.
    """

    def __init__(self, low: int = 10, high: int = 49) -> None:
        self.low = low
        self.high = high
        self.answers: list[str] = []

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin with two summands that follow from the seed."""
        draw = random.Random(seed)
        first, second = draw.randint(self.low, self.high), draw.randint(self.low, self.high)
        total = f"{first + second:03d}"
        self.answers = [total, total[1]]
        return f"{first:02d}+{second:02d}=", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Compare the answer with the one that is due; see the module."""
        right = action == self.answers.pop(0)
        over = not right or not self.answers
        return "" if over else "?", float(right), over, False, {}
