"""Fitness with racing: more samples for those agents alone that the first samples cannot separate.

The idea of racing (Maron and Moore 1997; Birattari et al. 2002) with the paired test of
`evolve.compare`: where all agents answer the same prompts, few of them need a second look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from evo_grpo.cohort.cohort import Cohort
from evo_grpo.envs.protocol import Environment
from evo_grpo.evaluate import Evaluation, evaluate, summarise
from evo_grpo.evolve.compare import compare
from evo_grpo.types import Score, Slot

LEVEL = 0.1
"""p-value from which on two agents count as separated."""


def race(  # noqa: PLR0913 -- what an evaluation takes, and what a second look may cost
    cohort: Cohort,
    env: Environment[Any],
    slots: Sequence[Slot],
    *,
    prompts: int,
    samples: int,
    temperature: float,
    extra: float,
    keep: int,
    round: int,
) -> tuple[list[Evaluation], int]:
    """Evaluate all agents, then again those about whom the next decision is open.

    Args:
        cohort: The agents.
        env: What they are evaluated in.
        slots: Which agents.
        prompts: Validation prompts, the same for all.
        samples: Completions per prompt in each look.
        temperature: The same for all.
        extra: What the further looks may cost, in completions, as a share of the first one.
        keep: Agents that the next round has room for: who is near the border is looked at again.
            With room for all, the border is the best agent.
        round: 0-based.

    Returns:
        One evaluation per agent, over all its samples, and the tokens that all of them sampled.
    """
    starts = env.prompts("validation", prompts)

    def look(these: Sequence[Slot], number: int) -> list[Evaluation]:
        stream = ("evaluate", round, *((number,) if number else ()))
        return evaluate(
            cohort, env, these, starts, samples=samples, temperature=temperature, stream=stream
        )

    results = dict(zip(slots, look(slots, 0), strict=True))
    tokens = sum(result.experience.tokens for result in results.values())
    left, number = extra * len(slots), 1
    while 1 < len(open_ones := undecided(results, keep)) <= left:
        left -= len(open_ones)
        for slot, more in zip(open_ones, look(open_ones, number), strict=True):
            results[slot] = merged(results[slot], more, len(starts))
            tokens += more.experience.tokens
        number += 1
    return [results[slot] for slot in slots], tokens


def undecided(results: dict[Slot, Evaluation], keep: int) -> list[Slot]:
    """Return the agents that cannot be told from one at the border, border agents among them.

    Args:
        results: The evaluations so far.
        keep: Agents that the next round has room for.
    """
    scores = {slot: r.score for slot, r in results.items() if np.isfinite(r.score.mean)}
    ranked = sorted(scores, key=lambda slot: (-scores[slot].mean, slot))
    border = ranked[keep - 1 : keep + 1] if keep < len(results) else ranked[:1]
    return [slot for slot in ranked if any(_level(scores[slot], scores[b]) for b in border)]


def _level(first: Score, second: Score) -> bool:
    ahead, behind = compare(first, second), compare(second, first)
    return not (ahead.significant(LEVEL) or behind.significant(LEVEL))


def merged(first: Evaluation, more: Evaluation, prompts: int) -> Evaluation:
    """Return an evaluation over the samples of two.

    Args:
        first: Of which the experience is kept, for it explains failures.
        more: On the same prompts.
        prompts: P.
    """
    tables = [e.rewards.reshape(prompts, -1) for e in (first, more)]
    rewards = np.concatenate(tables, axis=1).reshape(-1)
    return replace(first, score=summarise(rewards, prompts), rewards=rewards)
