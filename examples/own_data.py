"""Your own rows and your own reward: 200 sums, with a reward for each right digit.

    python examples/own_data.py

The rows can also come from a file: docs/own_data.md shows the same with YAML.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from evo_grpo import GRPO, DatasetEnv


def make_rows(count: int = 200) -> list[dict[str, str]]:
    """Return different rows, each with a question and its answer."""
    draw = random.Random(7)
    pairs = draw.sample([(a, b) for a in range(10, 60) for b in range(10, 40)], count)
    return [{"question": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"} for a, b in pairs]


def digits(completion: str, answer: str) -> float:
    """Return the share of right digits, so that the rewards in a group nearly always differ."""
    if len(completion) != len(answer):
        return 0.0
    return sum(said == digit for said, digit in zip(completion, answer, strict=True)) / len(answer)


def main(rounds: int = 4, steps: int = 6, out: str = "runs/own-data") -> dict[str, Any]:
    """Train four agents, and return the summary of the run."""
    rows = make_rows()
    env = DatasetEnv(
        rows[:150], digits, validation=rows[150:170], test=rows[170:], prompt="{question}"
    )
    population = GRPO.population(
        size=4,
        model="tiny-sums",
        max_output_tokens=4,
        hyperparameters={"lr": {"min": 1e-4, "max": 1e-2}},
    )
    population.train(
        env,
        rounds=rounds,
        steps_per_round=steps,
        fitness={"prompts": 20, "test_prompts": 30},
        out=out,
        force=True,
    )
    print(population.leaderboard()[["rank", "agent", "fitness", "lr"]].to_string(index=False))
    summary = json.loads((Path(out) / "summary.json").read_text(encoding="utf-8"))
    base, best = summary["base"]["mean"], summary["best"]["mean"]
    print(f"digits right on 30 test rows: {base:.2f} before, {best:.2f} after")
    return summary


if __name__ == "__main__":
    main()
