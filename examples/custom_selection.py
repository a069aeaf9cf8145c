"""Your own selection, compared with the tournament on the same prompts.

    python examples/custom_selection.py

It keeps the agents that improved most, instead of the best ones: late bloomers get a chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evo_grpo import GRPO, Offspring, Selector, TournamentSelection
from evo_grpo.types import Score


@dataclass
class MostImproved:
    """Keep the agents whose fitness rose most; no agent is copied.

    Attributes:
        keep_best: Whether the best agent always keeps its place.
    """

    keep_best: bool = True

    def plan(
        self, histories: Sequence[Sequence[Score]], places: int, rng: np.random.Generator
    ) -> tuple[Offspring, ...]:
        """Return the agents that continue, by position; each is its own parent."""
        usable = [position for position, scores in enumerate(histories) if scores]
        gain = {p: histories[p][-1].mean - histories[p][0].mean for p in usable}
        best = max(usable, key=lambda p: histories[p][-1].mean)
        order = sorted(usable, key=lambda p: (p == best and self.keep_best, gain[p]), reverse=True)
        return tuple(Offspring(p, p, elite=p == best) for p in sorted(order[:places]))


def train(selection: Selector, rounds: int, steps: int) -> float:
    """Train six agents with a selection and return the best fitness."""
    population = GRPO.population(
        size=6, model="tiny-sums", hyperparameters={"lr": {"min": 1e-5, "max": 1e-2}}
    )
    population.train(
        "sums",
        rounds=rounds,
        steps_per_round=steps,
        decisions="every",  # a rise of fitness needs an evaluation after each round
        sizes=[6, 4, 2],
        selection=selection,
        fitness={"prompts": 32},
    )
    return float(population.leaderboard()["fitness"].iloc[0])


def main(rounds: int = 3, steps: int = 6) -> dict[str, float]:
    """Train with both selections, and return the best fitness of each."""
    results = {
        "tournament": train(TournamentSelection(size=2), rounds, steps),
        "most improved": train(MostImproved(), rounds, steps),
    }
    for name, fitness in results.items():
        print(f"{name:14} {fitness:.2f}")
    return results


if __name__ == "__main__":
    main()
