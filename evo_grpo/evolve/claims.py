"""Decides which differences between agents may be claimed, from their rewards on shared prompts.

These tests are for reports. Evolution copies and removes agents by the test of `evolve.compare`.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from evo_grpo.evolve.compare import sign_flip
from evo_grpo.types import Score

TEST_LEVEL = 0.05
"""Probability of any wrong claim among scores on the test split."""
TIE_LEVEL = 0.1
"""Probability of any wrong claim on a leaderboard, and among the finalists."""


def claims(scores: Sequence[Score], index: int, level: float) -> list[int]:
    """Return for each score 1 if the score at `index` is shown to be ahead of it, -1 if behind.

    The number is 0 if neither is shown. All `scores` have the same prompts in the same order.
    `level` is the greatest probability of any wrong claim.
    """
    gaps = [_apart(scores[index], other) for other in scores]
    p_values = [chance(scores[index], other) for other in scores]
    return signs([float(a.mean()) if len(a) else 0.0 for a in gaps], p_values, len(scores), level)


def signs(
    differences: Sequence[float], chances: Sequence[float], agents: int, level: float
) -> list[int]:
    """Return the sign of each difference that may be claimed, 0 for all others.

    `differences` are those between one agent and each of the others. `chances` are their p-values;
    a difference whose p-value is NaN is never claimed. This is Holm's test (1979) over all pairs of
    `agents` agents, with the count of Shaffer (1986): once some agents are known to differ, fewer
    pairs can be equal. The probability of claiming that any two equal agents differ is at most
    `level`, even if the one agent was chosen by its score.
    """
    pairs = [math.comb(agents, 2), math.comb(agents - 1, 2), 1 + math.comb(max(agents - 2, 0), 2)]
    count = -1
    claimed: list[bool] = []
    while sum(claimed) > count:
        count = sum(claimed)
        equal_pairs = max(1, pairs[min(count, 2)])
        claimed = [p <= level / equal_pairs for p in chances]
    return [int(np.sign(d)) if ok else 0 for d, ok in zip(differences, claimed, strict=True)]


def chance(first: Score, second: Score) -> float:
    """Return the two-sided p-value of the difference of two scores; 1 if no shared prompt differs.

    The null hypothesis of `sign_flip` is that both agents have the same distribution of rewards on
    every prompt, so that each difference has either sign with the same probability. If only the
    means are equal, the sign-flip test rejects too often: for instance if one agent's reward is
    always 1, and the other's is 20 in one case of twenty and else 0. So the larger p-value of two
    tests is returned: of `sign_flip`, and of the t statistic corrected for skewness (Hall 1992, J.
    R. Statist. Soc. B 54).
    """
    differences = _apart(first, second)
    nonzero = differences[differences != 0]
    return max(sign_flip(nonzero), _skew_p_value(differences)) if len(nonzero) else 1.0


def _apart(first: Score, second: Score) -> np.ndarray:
    """Return the differences of two scores by prompt, from their first evaluations, without NaN."""
    rewards, others = (score.first_look or score.per_prompt for score in (first, second))
    if len(rewards) != len(others):
        return np.empty(0)
    differences = np.subtract(rewards, others, dtype=np.float64)
    return differences[np.isfinite(differences)]


def _skew_p_value(apart: np.ndarray) -> float:
    """Return Hall's two-sided p-value of differences `apart`; 0 if fewer than 3 or all equal."""
    count, spread = len(apart), apart.std()
    if count < 3 or not spread > 1e-12 * np.abs(apart).max():
        return 0.0
    root, skew = math.sqrt(count), float(((apart - apart.mean()) ** 3).mean() / spread**3)
    t = float(apart.mean() / spread) * math.sqrt(count - 1)
    t += skew * (2 * t**2 + 1) / (6 * root) + skew**2 * t**3 / (27 * count)
    return 2 * NormalDist().cdf(-abs(t))
