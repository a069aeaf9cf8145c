"""Rewards of training as evidence beside a fitness. Pure.

A run samples many more completions to train than to evaluate. Agents train on the same prompts, so
their rewards can be compared in pairs, as those of an evaluation are. They lag behind: each comes
from the weights before its step. A straight line through the steps since the last decision, taken
at their end, removes the lag of an agent that learns at a steady pace.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evo_grpo.types import Score

LEAST_STEPS = 4
"""Fewest steps through which a line is drawn."""
WORTH = 0.125
"""Completions of an evaluation that a completion of training is worth: 1/4, since the end of a line
has four times the variance of a mean of as many values, and half of that, since completions of one
prompt are alike."""


def with_training(
    score: Score, rewards: Sequence[float | None], rows: float, samples: int
) -> Score:
    """Return a fitness with the rewards of training as further evidence.

    The mean of the result is that of both estimates, weighted by the completions behind them. Each
    step is one more entry of `per_prompt`, scaled so that the mean of all entries is that mean;
    differences of two agents have one sign flipped for each prompt and each step.

    Args:
        score: A fitness over P prompts.
        rewards: Mean reward of each step since the last decision, the same steps for all agents.
        rows: Completions of one agent in a step.
        samples: Completions of each of the P prompts.
    """
    steps = np.array([np.nan if one is None else one for one in rewards], dtype=np.float64)
    count = len(steps)
    if count < LEAST_STEPS or not score.per_prompt or not np.isfinite(steps).all():
        return score
    prompts = np.array(score.per_prompt, dtype=np.float64)
    # Prompts without a reward count too: every agent of a decision has the same weights.
    own, more = len(prompts) * samples, count * rows * WORTH
    share = own / (own + more)
    at = np.arange(count) - (count - 1) / 2
    line = (
        1 / count + at * (count / 2) / (at**2).sum()
    )  # the line's value half a step after the last
    entries = len(prompts) + count
    scaled = (
        *(entries * share / len(prompts) * prompts),
        *(entries * (1 - share) * line * steps),
    )
    mean = share * score.mean + (1 - share) * float(line @ steps)
    return replace(score, mean=mean, per_prompt=tuple(map(float, scaled)), steps=count)
