"""Would training rewards as a second signal, beside the evaluation, choose better agents?

    python experiments/evolution/second_signal.py [--task sums] [--seeds 8]

Eight agents with learning rates over the whole range train without selection. After each round
every agent has its fitness (validation prompts, one completion each), the mean training reward of
the round, which costs nothing, and what it is worth: the mean of 1,024 completions of the test
split. A selection by (1 - w) fitness + w reward is as good as the agent that it puts first: the
regret is what the best of the round is ahead of it. README.md has the answer.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy and torch

from arms import ARMS, TASKS, Task, overrides
from stats import bootstrap

from evo_grpo import settings
from evo_grpo.population.evaluate import evaluate
from evo_grpo.population.steps import RunWriter
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord
from evo_grpo.training.assemble import Prepared, prepare
from evo_grpo.training.run import play_rounds

WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
APART = 0.02  # true rewards that are closer count as equal
PROMPTS, SAMPLES = 256, 4
NOBODY_LEAVES = {
    "population.sizes": "constant",
    "evolve.selection": "none",
    "evolve.exploration": "none",
    "evolve.archive": False,
    "evolve.dead_steps": None,
}


@dataclass(frozen=True)
class Agent:
    """One agent after one round.

    Attributes:
        fitness: Mean reward on the validation prompts.
        reward: Mean reward of the round's training.
        truth: Mean reward of many completions of the test split.
    """

    fitness: float
    reward: float
    truth: float


class Watcher(Observer):
    """Measures what each agent is worth after each round.

    Args:
        prepared: The run.
    """

    def __init__(self, prepared: Prepared) -> None:
        """Begin before the first round."""
        self.prepared = prepared
        self.rounds: list[list[Agent]] = []

    def round_done(self, record: RoundRecord) -> None:
        """Evaluate all agents, which nothing has replaced."""
        cohort, env, slots = self.prepared.cohort, self.prepared.env, self.prepared.slots
        found = evaluate(
            cohort,
            env,
            list(slots),
            env.prompts("test", PROMPTS),
            samples=SAMPLES,
            temperature=1.0,
            stream=("truth", record.round),
        )
        self.rounds.append(
            [
                Agent(agent.score.mean, agent.metrics["reward"], result.score.mean)
                for agent, result in zip(record.agents, found, strict=True)
                if agent.score is not None
            ]
        )


def rounds_of(task: Task, seed: int) -> list[list[Agent]]:
    """Train a population of a task without selection; returns its agents by round."""
    tree: dict[str, Any] = {}
    for path, value in {**overrides(task, ARMS["new"], seed), **NOBODY_LEAVES}.items():
        *above, name = path.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[name] = value
    prepared = prepare(settings.from_dict(tree))
    watcher = Watcher(prepared)
    play_rounds(prepared, prepared.slots, [], writer=RunWriter(), observer=watcher)
    return watcher.rounds


def regret(agents: Sequence[Agent], weight: float) -> float:
    """Return what the best agent is ahead of the one that is put first."""
    first = max(agents, key=lambda a: (1 - weight) * a.fitness + weight * a.reward)
    return max(a.truth for a in agents) - first.truth


def ranked_right(rounds: Sequence[Sequence[Agent]], weight: float) -> float:
    """Return the share of the pairs with different true rewards that are in their order."""
    right = [
        ((1 - weight) * (a.fitness - b.fitness) + weight * (a.reward - b.reward))
        * (a.truth - b.truth)
        > 0
        for agents in rounds
        for number, a in enumerate(agents)
        for b in agents[:number]
        if abs(a.truth - b.truth) > APART
    ]
    return statistics.mean(right)


def main() -> None:
    """Measure, and print a line per weight."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", choices=list(TASKS), default="sums")
    parser.add_argument("--seeds", type=int, default=8)
    given = parser.parse_args()
    by_seed: list[list[list[Agent]]] = []
    for seed in range(given.seeds):
        by_seed.append(rounds_of(TASKS[given.task], seed))
        print(f"seed {seed}: {len(by_seed[-1])} rounds", flush=True)
    every = [agents for rounds in by_seed for agents in rounds]
    alone = [statistics.mean(regret(a, 0.0) for a in rounds) for rounds in by_seed]
    for weight in WEIGHTS:
        mine = [statistics.mean(regret(a, weight) for a in rounds) for rounds in by_seed]
        more = bootstrap([m - o for m, o in zip(mine, alone, strict=True)])
        print(
            f"weight {weight:.1f}: {ranked_right(every, weight):.1%} of pairs in their order, "
            f"regret {statistics.mean(mine):.4f}, over fitness alone {more.mean:+.4f} "
            f"[{more.low:+.4f}, {more.high:+.4f}]"
        )


if __name__ == "__main__":
    main()
