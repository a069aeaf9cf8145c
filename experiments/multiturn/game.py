"""A game of several turns for the embedded model tiny-sums: keep a running total, digit by digit.

    environment  37+25=
    policy       062
    environment  62+08=
    policy       070
    environment  70+19=
    policy       089

Each right total earns 1 and brings the next question, which begins with it; a wrong one ends the
episode. So the return counts right answers in a row, up to `turns`, and the turns after the first
are only met, and learned, by a policy that gets there.
"""

from __future__ import annotations

import random
from typing import Any


class RunningTotal:
    """One player's running total.

    Args:
        turns: Questions of an episode, >= 1.
    """

    def __init__(self, turns: int = 4) -> None:
        self.turns = turns
        self.asked = 0
        self.total = 0
        self.draws = random.Random(0)

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin with two numbers that follow from the seed."""
        self.draws = random.Random(seed)
        self.asked = 0
        self.total = self.draws.randint(10, 40)
        return self._ask(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Compare the answer with the total; see the module."""
        right = action == f"{self.total:03d}"
        over = not right or self.asked >= self.turns
        return ("" if over else self._ask()), float(right), over, False, {"total": self.total}

    def _ask(self) -> str:
        added = self.draws.randint(1, 15)
        question = f"{self.total:02d}+{added:02d}="
        self.total += added
        self.asked += 1
        return question
