"""A selection of your own, beside the tournament, on the same prompts.

    python examples/custom_selection.py

It keeps who improved most in a round instead of who is best: late bloomers get a chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evo_grpo import GRPO, Offspring, Selector, TournamentSelection
from evo_grpo.types import Score


@dataclass
class MostImproved:
    """The places of the next round go to the agents whose fitness rose most; nobody is copied.

    Attributes:
        keep_best: Whether the best agent has a place whatever it gained.
    """

    keep_best: bool = True

    def plan(
        self, histories: Sequence[Sequence[Score]], places: int, rng: np.random.Generator
    ) -> tuple[Offspring, ...]:
        """Return who goes on: agents by position, each its own parent."""
        usable = [position for position, scores in enumerate(histories) if scores]
        gain = {p: histories[p][-1].mean - histories[p][0].mean for p in usable}
        best = max(usable, key=lambda p: histories[p][-1].mean)
        order = sorted(usable, key=lambda p: (p == best and self.keep_best, gain[p]), reverse=True)
        return tuple(Offspring(p, p, elite=p == best) for p in sorted(order[:places]))


def train(selection: Selector, rounds: int, steps: int) -> float:
    """Return the fitness of the best of six agents after a run with a selection."""
    population = GRPO.population(
        size=6, model="tiny-sums", hyperparameters={"lr": {"min": 1e-5, "max": 1e-2}}
    )
    population.train(
        "sums",
        rounds=rounds,
        steps_per_round=steps,
        sizes=[6, 4, 2],
        selection=selection,
        fitness={"prompts": 32},
    )
    return float(population.leaderboard()["fitness"].iloc[0])


def main(rounds: int = 3, steps: int = 6) -> dict[str, float]:
    """Train with both, and return the best fitness of each."""
    results = {
        "tournament": train(TournamentSelection(size=2), rounds, steps),
        "most improved": train(MostImproved(), rounds, steps),
    }
    for name, fitness in results.items():
        print(f"{name:14} {fitness:.2f}")
    return results


if __name__ == "__main__":
    main()
