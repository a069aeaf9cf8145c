"""A game of two turns: add two numbers, then say the middle digit of the sum.

    python examples/game.py

    environment  37+25=
    agent        062
    environment  ?
    agent        6

A wrong first answer ends the episode: agents only learn the second question once they reach it.
"""

from __future__ import annotations

import random
from typing import Any

from evo_grpo import GRPO, MultiTurnGym


class MiddleDigit:
    """An environment with Gymnasium's two methods, on text."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode; the same seed starts the same episode."""
        draw = random.Random(seed)
        first, second = draw.randint(10, 49), draw.randint(10, 49)
        total = f"{first + second:03d}"
        self.answers = [total, total[1]]
        return f"{first:02d}+{second:02d}=", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Return the next question, the reward, terminated, truncated and info."""
        right = action == self.answers.pop(0)
        over = not right or not self.answers
        return "" if over else "?", float(right), over, False, {}


def main(rounds: int = 4, steps: int = 8) -> float:
    """Train four agents, and return the best mean reward per episode (at most 2)."""
    population = GRPO.population(
        size=4,
        model="tiny-sums",
        group_size=12,
        max_output_tokens=4,
        hyperparameters={"lr": {"min": 3e-4, "max": 3e-3}},
    )
    env = MultiTurnGym(
        MiddleDigit,
        population.cohort.base.tokenizer,
        max_turns=2,
        batch_size=6,
        apply_chat_template=False,
    )
    population.train(env, rounds=rounds, steps_per_round=steps, fitness={"prompts": 64})
    board = population.leaderboard()
    print(board[["rank", "agent", "fitness", "lr"]].to_string(index=False))
    return float(board["fitness"].iloc[0])


if __name__ == "__main__":
    main()
