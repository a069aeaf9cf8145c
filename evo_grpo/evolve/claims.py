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
    """Compare the score at `index` with each score: 1 if it is shown to be ahead, -1 if behind.

    The number is 0 if neither is shown. All `scores` have the same prompts in the same order.
    """
    gaps = [_apart(scores[index], other) for other in scores]
    p_values = [chance(scores[index], other) for other in scores]
    return signs([float(a.mean()) if len(a) else 0.0 for a in gaps], p_values, len(scores), level)


def signs(
    differences: Sequence[float], chances: Sequence[float], agents: int, level: float
) -> list[int]:
    """Return the sign of each difference that may be claimed, 0 for all others.

    `differences` are those between one agent and the others, and `chances` their p-values; NaN is
    never claimed. This is Holm's test (1979) over all pairs of `agents` agents, with the count of
    Shaffer (1986), since fewer pairs can be equal once some agents are known to differ. So the
    probability of any claim about two equal agents is at most `level`, however that one agent was
    chosen.
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
    """Return the two-sided p-value of the difference of two scores; 1 without a shared prompt.

    The null hypothesis of `sign_flip` is that both have the same distribution of rewards on every
    prompt, so that each difference has either sign with the same probability. If only the means
    are equal, as with a constant 1 and a rare 20, the sign-flip test exceeds its level. So the
    p-value returned is at least that of the t statistic corrected for skewness (Hall 1992, J. R.
    Statist. Soc. B 54).
    """
    differences = _apart(first, second)
    nonzero = differences[differences != 0]
    return max(sign_flip(nonzero), _skew_p_value(differences)) if len(nonzero) else 1.0


def _apart(first: Score, second: Score) -> np.ndarray:
    """Return the finite differences per prompt, in the evaluation before any racing."""
    rewards, others = (score.first_look or score.per_prompt for score in (first, second))
    if len(rewards) != len(others):
        return np.empty(0)
    differences = np.subtract(rewards, others, dtype=np.float64)
    return differences[np.isfinite(differences)]


def _skew_p_value(apart: np.ndarray) -> float:
    """Return the two-sided p-value of Hall's corrected t; 0 for equal or fewer than 3 values."""
    count, spread = len(apart), apart.std()
    if count < 3 or not spread > 1e-12 * np.abs(apart).max():
        return 0.0
    root, skew = math.sqrt(count), float(((apart - apart.mean()) ** 3).mean() / spread**3)
    t = float(apart.mean() / spread) * math.sqrt(count - 1)
    t += skew * (2 * t**2 + 1) / (6 * root) + skew**2 * t**3 / (27 * count)
    return 2 * NormalDist().cdf(-abs(t))
