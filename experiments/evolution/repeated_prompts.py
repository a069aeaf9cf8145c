"""Do errors and paired tests hold where a dataset has the same prompt in several rows?

    python experiments/evolution/repeated_prompts.py --cases 2000

Draws prompts and rewards of their rows, and asks how often the interval around a score covers the
mean over all prompts of the task, and how often agents of equal reward are told apart. "Rows" is
what the interval covers where every row counts as a prompt. docs/results.md has the result. One
minute on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from claims import Draw, rates

from evo_grpo.evolve.claims import TEST_LEVEL, TIE_LEVEL
from evo_grpo.evolve.intervals import interval
from evo_grpo.population.evaluate import summarise

KINDS = ("normal", "0/1")


def repeated(kind: str, agents: int, prompts: int, rows: int) -> Callable[..., Draw]:
    """Return what makes a task of prompts in several rows each; their mean is 0, or 1/2 for 0/1."""

    def task(rng: np.random.Generator) -> Draw:
        hard = rng.normal(size=(prompts, 1)) if kind == "normal" else rng.random((prompts, 1))

        def draw(rng: np.random.Generator) -> np.ndarray:
            noise = rng.normal if kind == "normal" else rng.random
            own = noise(size=(agents, prompts, rows))
            return hard + own if kind == "normal" else (own < hard).astype(float)

        return draw

    return task


def covers(kind: str, prompts: int, rows: int, cases: int) -> tuple[float, float]:
    """Return how often the interval covers the mean: of the package, and with rows as prompts."""
    rng, found = np.random.default_rng(0), np.zeros(2)
    truth = 0.0 if kind == "normal" else 0.5
    equal = np.repeat(np.arange(prompts), rows).tolist()
    for _ in range(cases):
        rewards = repeated(kind, 1, prompts, rows)(rng)(rng)[0].ravel()
        for i, units in enumerate((equal, range(len(rewards)))):
            score = summarise(rewards, units)
            low, high = interval(score.mean, score.se, score.n)
            found[i] += low <= truth <= high
    return tuple((found / cases).tolist())


def per_prompt(kind: str, agents: int, prompts: int, rows: int) -> Callable[..., Draw]:
    """Return the task whose rewards are the means of each prompt, as a score has them."""
    task = repeated(kind, agents, prompts, rows)

    def means(rng: np.random.Generator) -> Draw:
        draw = task(rng)
        return lambda rng: draw(rng).mean(axis=2)

    return means


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    cases = parser.parse_args().cases
    sizes = [(prompts, rows) for prompts in (4, 8, 20, 64) for rows in (1, 5, 20)]
    print("| rewards | prompts | rows of each | interval covers | with rows as prompts |")
    print("|---|---|---|---|---|", flush=True)
    for kind in KINDS:
        for prompts, rows in sizes:
            ours, naive = covers(kind, prompts, rows, cases)
            print(f"| {kind} | {prompts} | {rows} | {ours:.3f} | {naive:.3f} |", flush=True)
    print(
        f"\n| rewards | prompts | rows of each | 2 agents at {TEST_LEVEL:g} | 8 agents at ", end=""
    )
    print(f"{TIE_LEVEL:g}, 1 look | 3 looks |\n|---|---|---|---|---|---|", flush=True)
    for kind in KINDS:
        for prompts, rows in sizes:
            cells = [
                rates(per_prompt(kind, agents, prompts, rows), cases, level, looks)[1]
                for agents, level, looks in (
                    (2, TEST_LEVEL, 1),
                    (8, TIE_LEVEL, 1),
                    (8, TIE_LEVEL, 3),
                )
            ]
            shown = " | ".join(f"{cell:.3f}" for cell in cells)
            print(f"| {kind} | {prompts} | {rows} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
