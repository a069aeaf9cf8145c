"""Do claims about agents hold their level, and how often do they find a true difference?

    python experiments/evolution/claims.py --cases 2000

Draws rewards of agents on shared prompts, lets the one with the greatest mean win, and asks which
others `evo_grpo.evolve.claims` shows to be behind it. "Before" is the rule that
it replaced: a one-sided paired test at .1 on all draws for the leaderboard, and a Student interval
of 95% for `evo-grpo compare`, both for each pair alone. docs/results.md has the result. Three
minutes on one core.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np

from evo_grpo.evolve.claims import TEST_LEVEL, TIE_LEVEL, chance, signs
from evo_grpo.evolve.intervals import student
from evo_grpo.types import Score

Draw = Callable[[np.random.Generator], np.ndarray]
"""Returns the rewards of one look, (agents, prompts)."""
KINDS = ("0/1", "normal", "lognormal", "0/1 at .05")
NORMAL = NormalDist()


def drawn(kind: str, agents: int, prompts: int, ahead: float = 0.0) -> Callable[..., Draw]:
    """Return what makes a task: prompts of unlike difficulty, the first agent ahead of the rest."""
    shift = np.zeros((agents, 1))
    shift[0] = ahead

    def task(rng: np.random.Generator) -> Draw:
        if kind == "0/1":
            level = rng.random(prompts) * (1 - ahead)
            return lambda rng: (rng.random((agents, prompts)) < level + shift).astype(float)
        if kind == "0/1 at .05":
            return lambda rng: (rng.random((agents, prompts)) < 0.05 + shift).astype(float)
        hard = rng.normal(size=prompts) + shift
        noise = "normal" if kind == "normal" else "lognormal"
        return lambda rng: hard + getattr(rng, noise)(size=(agents, prompts))

    return task


def statistics(table: np.ndarray, best: int) -> np.ndarray:
    """Return the summed differences of the best to each agent over the root of their squares."""
    apart = table[best] - table
    return apart.sum(axis=1) / np.sqrt(np.maximum((apart**2).sum(axis=1), 1e-300))


def raced(draw: Draw, looks: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the rewards of the first look, and those over all looks, as racing merges them.

    Those agents are looked at again that the agents at the border, the middle of the ranks, cannot
    be told from.
    """
    first = draw(rng)
    total, count = first.copy(), np.ones(len(first))
    for _ in range(looks - 1):
        merged = total / count[:, None]
        ranked = np.argsort(-merged.mean(axis=1))
        border = ranked[[max(0, len(ranked) // 2 - 1), len(ranked) // 2]]
        near = np.min([np.abs(statistics(merged, b)) for b in border], axis=0) < 1.2816
        if near.sum() < 2:
            break
        total[near] += draw(rng)[near]
        count[near] += 1
    return first, total / count[:, None]


def after(first: np.ndarray, best: int, level: float) -> np.ndarray:
    """Return the claims of the package about the best, on the first look."""
    agents, found = len(first), statistics(first, best)
    least = level / max(1, math.comb(agents, 2))
    scores = [Score(0.0, math.nan, len(row), tuple(row.tolist())) for row in first]
    chances = np.ones(agents)
    for i, t in enumerate(found):
        if i != best and 2 * NORMAL.cdf(-abs(t)) < 6 * least:
            chances[i] = chance(scores[best], scores[i])  # others are far above the level
    return np.array(signs(found.tolist(), chances.tolist(), agents, level))


def before(merged: np.ndarray, best: int, level: float) -> np.ndarray:
    """Return the claims of the rule before, with the normal in place of sampled signs."""
    if level == TIE_LEVEL:
        return statistics(merged, best) > NORMAL.inv_cdf(1 - level)
    apart, count = merged[best] - merged, merged.shape[1]
    error = np.maximum(apart.std(axis=1, ddof=1), 1e-300) / math.sqrt(count)
    return np.abs(apart.mean(axis=1)) > student(1 - level / 2, count - 1) * error


def rates(
    task: Callable[[np.random.Generator], Draw],
    cases: int,
    level: float = TIE_LEVEL,
    looks: int = 1,
    equal: Sequence[int] | None = None,
    seed: int = 0,
) -> tuple[float, float]:
    """Return how often any two of the `equal` agents (None: all) are told apart: before, after."""
    rng, found = np.random.default_rng(seed), np.zeros(2)
    for _ in range(cases):
        first, merged = raced(task(rng), looks, rng)
        own = np.arange(len(first)) if equal is None else np.array(equal)
        best = int(own[np.argmax(merged[own].mean(axis=1))])
        found += [
            before(merged, best, level)[own].any(),
            after(first, best, level)[own].any(),
        ]
    return tuple((found / cases).tolist())


def power(task: Callable[..., Draw], cases: int, level: float) -> tuple[float, float]:
    """Return the share of the others that the first agent wins against and is claimed ahead of."""
    rng, found = np.random.default_rng(1), np.zeros(2)
    for _ in range(cases):
        table = task(rng)(rng)
        if int(table.mean(axis=1).argmax()) == 0:
            found += [before(table, 0, level)[1:].mean(), (after(table, 0, level)[1:] > 0).mean()]
    return tuple((found / cases).tolist())


def unlike(kind: str, agents: int, prompts: int = 64) -> Callable[..., Draw]:
    """Return tasks whose agents differ in more than their mean, or of which only some are equal."""

    def draw(rng: np.random.Generator) -> np.ndarray:
        if kind == "spread":  # every other agent is five times as loud
            return (
                rng.normal(size=(agents, prompts)) * np.where(np.arange(agents) % 2, 5, 1)[:, None]
            )
        if kind == "subset":  # the first two are loud and equal, the others quiet and worse
            quiet = -3 + 0.01 * rng.normal(size=(agents - 2, prompts))
            return np.concatenate([rng.normal(size=(2, prompts)), quiet])
        rare = 20.0 * (rng.random((agents, prompts)) < 0.05)
        return np.where(np.arange(agents)[:, None] % 2, rare, 1.0)  # "shape"

    return lambda _rng: draw


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    cases = parser.parse_args().cases
    bound = TIE_LEVEL + 2 * math.sqrt(TIE_LEVEL * (1 - TIE_LEVEL) / cases)
    print(f"Equal agents, 64 prompts, any claim, level {TIE_LEVEL:g} (at most {bound:.3f}):")
    print("| rewards | agents | 1 look | 3 looks | 20 looks |\n|---|---|---|---|---|", flush=True)
    for kind in KINDS:
        for agents in (2, 3, 8, 32):
            task = drawn(kind, agents, 64)
            cells = [rates(task, cases, looks=looks, seed=looks) for looks in (1, 3, 20)]
            shown = " | ".join(f"{old:.3f} → {new:.3f}" for old, new in cells)
            print(f"| {kind} | {agents} | {shown} |", flush=True)
    print(f"\nTwo runs, 256 prompts, level {TEST_LEVEL:g}:\n\n| rewards | rate |\n|---|---|")
    for kind in KINDS:
        old, new = rates(drawn(kind, 2, 256), cases, TEST_LEVEL)
        print(f"| {kind} | {old:.3f} → {new:.3f} |", flush=True)
    print("\nUnlike agents, 64 prompts:\n\n| agents | number | rate |\n|---|---|---|")
    for kind, agents in (("spread", 2), ("spread", 8), ("subset", 8), ("subset", 32), ("shape", 2)):
        equal = (0, 1) if kind == "subset" else None
        old, new = rates(unlike(kind, agents), cases, equal=equal)
        print(f"| {kind} | {agents} | {old:.3f} → {new:.3f} |", flush=True)
    print("\nPower, one agent ahead:\n\n| rewards | ahead by | agents | prompts | level | found |")
    print("|---|---|---|---|---|---|")
    for kind, ahead in (("0/1", 0.15), ("normal", 0.3)):
        for agents, prompts, level in (
            (2, 64, TIE_LEVEL), (8, 64, TIE_LEVEL), (2, 256, TIE_LEVEL), (8, 256, TIE_LEVEL),
            (2, 256, TEST_LEVEL),
        ):  # fmt: skip
            old, new = power(drawn(kind, agents, prompts, ahead), cases // 2, level)
            row = (kind, ahead, agents, prompts, f"{level:g}", f"{old:.2f} → {new:.2f}")
            print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
