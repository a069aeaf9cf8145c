"""Several rewards: one for right answers, and one for numbers close to the answer.

    python examples/several_rewards.py

The reward of each function is recorded separately, which shows what the agents learned.
"""

from __future__ import annotations

import pandas as pd

import evo_grpo
from evo_grpo import GRPO, DatasetEnv


def right(completion: str, answer: str) -> float:
    """Return 1 for the right answer."""
    return float(completion == answer)


def close(completion: str, answer: str) -> float | None:
    """Return how close the number is to the answer; abstain if there is no number."""
    if not completion.isdigit():
        return None
    return max(0.0, 1.0 - abs(int(completion) - int(answer)) / 20)


def main(rounds: int = 3, steps: int = 6, out: str = "runs/rewards") -> pd.DataFrame:
    """Train four agents, and return the mean of each reward per round."""
    rows = [
        {"question": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"}
        for a in range(10, 40)
        for b in range(10, 17)
    ]
    env = DatasetEnv(
        rows,
        [right, close],
        test=[{"question": f"{a}+12=", "answer": f"{a + 12:03d}"} for a in range(41, 51)],
        prompt="{question}",
        reward_weights=[1.0, 0.3],
    )
    population = GRPO.population(
        size=4,
        model="tiny-sums",
        max_output_tokens=4,
        hyperparameters={"lr": {"min": 1e-4, "max": 1e-2}},
    )
    population.train(
        env, rounds=rounds, steps_per_round=steps, fitness={"prompts": 20}, out=out, force=True
    )
    steps_frame = evo_grpo.read_metrics(out)
    names = [name for name in steps_frame.columns if name.startswith("reward")]
    means = steps_frame.groupby("round")[names].mean()
    print(means.round(2).to_string())
    return means


if __name__ == "__main__":
    main()
