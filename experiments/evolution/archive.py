"""How often the archive is restored, by simulation with the functions of the package.

    python experiments/evolution/archive.py

Rewards are drawn for agents whose true skill is known. Prints a table in Markdown: restorings among
equal agents, restorings of an archive that is worse than the present best, and restorings after all
agents have fallen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from evo_grpo.evolve.decide import ARCHIVE_LEVEL, Standing, Strategy, decide, enters_archive
from evo_grpo.evolve.explore.on_copy import NoExploration
from evo_grpo.evolve.goals import best_first
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.population.evaluate import summarise
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.types import Member, Score, Slot

ARCHIVE = Slot(99)


@dataclass
class Population:
    """Agents with true skills, and an archive.

    Attributes:
        rng: Stream of all draws.
        prompts: Validation prompts of a fitness, and of a fresh measurement.
        binary: Rewards are 0 or 1, with the skill as their probability; else normal around it.
        decisions: Decisions over which the level is spent.
    """

    rng: np.random.Generator
    prompts: int
    binary: bool
    decisions: int
    archive: Standing | None = None
    archived: float = 0.0

    def score(self, skill: float, hard: np.ndarray) -> Score:
        """Draw the fitness of an agent on prompts that differ by `hard`."""
        if self.binary:
            draws = self.rng.random(self.prompts) < np.clip(skill + hard, 0, 1)
            return summarise(draws.astype(float), self.prompts)
        return summarise(skill + hard + self.rng.normal(size=self.prompts), self.prompts)

    def play(self, members: list[Member], skills: dict[int, float], round: int) -> bool:
        """Decide after a round; return whether a worse or equal or better archive was restored."""
        spread = 0.1 if self.binary else 1.0
        hard = self.rng.normal(0, spread, self.prompts) * (0.5 if self.binary else 1)
        standings = [
            Standing(m.agent, m, Hparams(lr=1e-3), [self.score(skills[m.id], hard)])
            for m in members
        ]
        best = min(standings, key=lambda s: best_first(s.history[-1]))
        fresh = dict[Slot, Score]()
        if self.archive is not None:
            other = self.rng.normal(0, spread, self.prompts) * (0.5 if self.binary else 1)
            fresh = {
                ARCHIVE: self.score(self.archived, other),
                best.slot: self.score(skills[best.member.id], other),
            }
        strategy = Strategy(
            TournamentSelection(), NoExploration(), HyperparameterConfig(), 0.1,
            archive_level=ARCHIVE_LEVEL / self.decisions,
        )  # fmt: skip
        generation, decisions = decide(
            standings, len(members), self.archive, strategy, self.rng,
            round=round, next_id=max(skills) + 1, fresh=fresh,
        )  # fmt: skip
        restored = any(one.kind == "restored" for one in decisions)
        known = dict(skills)
        for member in generation.members:
            parent = known.get(member.parent if member.parent is not None else -1, 0.0)
            own = self.archived if member.mutation.restores else parent
            skills.setdefault(member.id, own)
        if not fresh or (not restored and enters_archive(fresh[best.slot], fresh[ARCHIVE])):
            self.archive = Standing(ARCHIVE, best.member, Hparams(lr=1e-3), best.history)
            self.archived = known[best.member.id]
        members[:] = generation.members
        return restored


def equal(agents: int, *, binary: bool, runs: int, rounds: int = 30) -> float:
    """Return the share of runs of equal agents in which something is restored."""
    found = 0
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        population = Population(rng, 64, binary, rounds)
        members = [Member(i, Slot(i)) for i in range(agents)]
        skills = {i: 0.5 if binary else 0.0 for i in range(agents)}
        found += any([population.play(members, skills, r) for r in range(rounds)])
    return found / runs


def improving(gain: float, *, runs: int, rounds: int = 30) -> float:
    """Return the share of runs in which an archive worse than the present best is restored."""
    found = 0
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        population = Population(rng, 64, False, rounds)
        members = [Member(i, Slot(i)) for i in range(2)]
        skills = dict.fromkeys(range(2), 0.0)
        worse = False
        for r in range(rounds):
            for member in members:
                skills[member.id] += gain
            before, best = population.archived, max(skills[m.id] for m in members)
            worse |= population.play(members, skills, r) and before < best - 1e-12
        found += worse
    return found / runs


def fallen(high: float, low: float, prompts: int, *, runs: int, decisions: int = 6) -> float:
    """Return the share of runs that restore within two decisions of a fall of all agents."""
    found = 0
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        population = Population(rng, prompts, True, decisions)
        members = [Member(i, Slot(i)) for i in range(4)]
        skills = dict.fromkeys(range(4), high)
        for r in range(3):
            population.play(members, skills, r)
        for member in members:
            skills[member.id] = low
        found += any([population.play(members, skills, r) for r in (3, 4)])
    return found / runs


def cases() -> Iterator[tuple[str, float]]:
    """Yield each case with its share of runs."""
    yield "equal agents, 30 decisions, 0/1 rewards, 2 agents", equal(2, binary=True, runs=1000)
    yield "the same, 8 agents", equal(8, binary=True, runs=300)
    yield "the same, normal rewards, 2 agents", equal(2, binary=False, runs=1000)
    for gain in (0.0, 0.005, 0.02, 0.05):
        name = f"an archive worse than the best, whose skill grows by {gain} a decision"
        yield name, improving(gain, runs=1000)
    for prompts in (64, 16):
        for low in (0.6, 0.4, 0.2):
            name = f"within two decisions of a fall from .8 to {low}, {prompts} prompts"
            yield name, fallen(0.8, low, prompts, runs=1000)


def main() -> None:
    """Print the table."""
    print("| case | runs with a restoring |\n| --- | --- |", flush=True)
    for name, share in cases():
        print(f"| {name} | {share:.3f} |", flush=True)


if __name__ == "__main__":
    main()
