"""A game of two turns: add two numbers, then say the middle digit of the sum.

    game    37+25=
    model   062
    game    ?
    model   6

Each right answer earns 1, so an episode returns 0, 1 or 2. A wrong answer ends the episode: a model
that never gets the sum right never sees the second question.
"""

import random


class MiddleDigit:
    """The environment that `env.kind` names, with Gymnasium's `reset` and `step` on text.

    Args:
        low: Least summand.
        high: Greatest summand.
    """

    def __init__(self, low: int = 10, high: int = 49) -> None:
        self.low = low
        self.high = high
        self.due: list[str] = []

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, str]]:
        """Begin an episode; the same seed begins the same episode.

        Returns:
            The text that the model reads first, and info.
        """
        draw = random.Random(seed)
        first, second = draw.randint(self.low, self.high), draw.randint(self.low, self.high)
        total = f"{first + second:03d}"
        self.due = [total, total[1]]
        return f"{first:02d}+{second:02d}=", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, str]]:
        """Judge an answer of the model.

        Returns:
            The text that the model reads next, the reward of this turn, whether the episode is over
            (`terminated`), whether it was cut short (`truncated`), and info.
        """
        right = action == self.due.pop(0)
        over = not right or not self.due
        return "" if over else "?", float(right), over, False, {}
