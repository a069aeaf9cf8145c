"""Compares two agents by paired tests, on validation rewards and training rewards.

Agents train on the same prompts, so their training rewards can be compared in pairs too. The reward
of a training step is that of the weights before the step. A straight line through these rewards
since the last decision gives the reward after the last step, if the agent learns at a constant
rate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from evo_grpo.types import Score

_GRID = 840
"""Grid steps from 0 to the largest difference; divisible by 1 to 8, so most means are exact."""
_CELLS = 10**9
"""Maximum of grid steps times the squared number of prompts, which take 0.2 s on one core."""


@dataclass(frozen=True)
class Comparison:
    """How far one agent is ahead of another on the prompts that both answered.

    Attributes:
        difference: Mean difference per prompt, in units of reward; NaN without a shared prompt.
        error: Standard error of `difference`; NaN from fewer than two prompts.
        prompts: Number of prompts that both agents answered.
        p: Probability of at least this difference if the agents are equal; 1 if the difference is
            not above 0.
        objective: Name of the objective that was compared, if it is not fitness; else empty.
        steps: Number of training steps whose rewards were compared in addition to the prompts.
    """

    difference: float
    error: float
    prompts: int
    p: float
    objective: str = ""
    steps: int = 0

    def significant(self, level: float) -> bool:
        """Return whether the first agent is ahead with a p-value of at most `level`."""
        return self.p <= level


def compare(first: Score, second: Score) -> Comparison:
    """Compare two scores over the same prompts; prompts with NaN in either score are left out.

    This is the one-sided paired sign-flip test (Fisher 1935, The Design of Experiments, section
    21): if the agents are equally good, each difference has either sign with the same probability.
    """
    if len(first.per_prompt) != len(second.per_prompt):
        return Comparison(first.mean - second.mean, math.nan, 0, 1.0)
    differences = np.subtract(first.per_prompt, second.per_prompt, dtype=np.float64)
    finite = np.isfinite(differences)
    steps = int(finite[len(finite) - first.steps :].sum())
    differences = differences[finite]
    count = len(differences)
    if count == 0:
        return Comparison(math.nan, math.nan, 0, 1.0)
    error = float(differences.std(ddof=1) / np.sqrt(count)) if count > 1 else math.nan
    # Exact sums: the same rewards on other prompts are no difference, not even in the last bit.
    ahead, behind = (
        math.fsum(np.asarray(s.per_prompt, dtype=np.float64)[finite]) for s in (first, second)
    )
    chance = sign_flip(differences[differences != 0]) / 2 if ahead > behind else 1.0
    return Comparison((ahead - behind) / count, error, count - steps, chance, steps=steps)


def sign_flip(moved: np.ndarray) -> float:
    """Return the two-sided p-value of the sign-flip test for differences `moved`, none of them 0.

    Among all ways to give every difference a sign, this is the share of those whose sum is at least
    as far from 0 as the sum of `moved`. It is exact within 3e-8 if there are at most 1,091
    differences and all are multiples of 1/840 of the largest; otherwise it is rounded up.
    """
    grid = min(_GRID, max(10, _CELLS // len(moved) ** 2))
    steps = np.abs(moved) * (grid / np.abs(moved).max())
    rounded = np.rint(steps).astype(np.int64)
    residuals = steps - rounded
    # A random part of the steps loses half of the sum of `residuals`, and at most `largest` more;
    # above `likely` with probability exp(-18) (Hoeffding 1963). 1e-6 covers the rounding of floats.
    largest, likely = np.abs(residuals).sum() / 2, 3 * float(np.linalg.norm(residuals))
    unlikely = 3e-8 if largest > likely + 1e-6 else 0.0
    slack = residuals.sum() / 2 + min(largest, likely) + 1e-6
    unit = np.gcd.reduce(rounded)
    least = math.ceil((max(steps[moved > 0].sum(), steps[moved < 0].sum()) - slack) / unit)
    rounded = np.sort(rounded // unit)
    sums = np.zeros(rounded.sum() + 1)  # probability of each sum of the positive differences
    sums[0], end = 1.0, 1
    for step in rounded.tolist():
        half = sums[:end] / 2
        sums[:end] = half
        sums[step : end + step] += half
        end += step
    return min(1.0, 2 * float(sums[max(least, 0) :].sum()) + unlikely)


LEAST_STEPS = 4
"""Fewest training steps to which a line is fitted."""
WORTH = 0.125
"""Weight of a training completion relative to an evaluation completion. The end of a fitted line
has four times the variance of a mean of as many values, hence 1/4; completions of one prompt are
alike, hence half of that."""


def with_training(
    score: Score, rewards: Sequence[float | None], rows: float, samples: int
) -> Score:
    """Return a score that combines a fitness with the rewards of training steps.

    Its mean is a weighted mean of the fitness and of the end of a line fitted to `rewards`; the
    weights are numbers of completions (see `WORTH`). Each step adds an entry to `per_prompt`, and
    all entries are scaled so that their mean is the mean of the result. If there are fewer than
    `LEAST_STEPS` steps, or if a reward is missing, `score` is returned.

    Args:
        score: A fitness over P prompts.
        rewards: Mean reward of each step since the last decision, the same steps for all agents.
        rows: Completions of one agent in a step.
        samples: Completions of each of the P prompts.
    """
    steps = np.array([np.nan if reward is None else reward for reward in rewards], dtype=np.float64)
    count = len(steps)
    if count < LEAST_STEPS or not score.per_prompt or not np.isfinite(steps).all():
        return score
    prompts = np.array(score.per_prompt, dtype=np.float64)
    # Prompts without a reward count too: every agent of a decision has the same weights.
    evaluated, trained = len(prompts) * samples, count * rows * WORTH
    share = evaluated / (evaluated + trained)
    times = np.arange(count) - (count - 1) / 2
    # Weights of the steps in the value of the fitted line half a step after the last step.
    line = 1 / count + times * (count / 2) / (times**2).sum()
    entries = len(prompts) + count
    scaled = (
        *(entries * share / len(prompts) * prompts),
        *(entries * (1 - share) * line * steps),
    )
    mean = share * score.mean + (1 - share) * float(line @ steps)
    return replace(score, mean=mean, per_prompt=tuple(map(float, scaled)), steps=count)
