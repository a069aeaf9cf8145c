"""A paired test of whether one agent is better than another on the prompts both answered."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from evo_grpo.types import Score

EXACT = 12
"""Largest number of differing prompts for which all sign patterns are counted, not sampled."""
_DRAWS = 4095


@dataclass(frozen=True)
class Comparison:
    """How far one agent is ahead of another on the prompts that both answered.

    Attributes:
        difference: Mean difference per prompt, in units of reward; NaN without a shared prompt.
        error: Standard error of that mean; NaN from fewer than two prompts.
        prompts: Shared prompts for which both have a reward.
        p: Probability of at least this difference between equally good agents; 1 if the first
            agent is not ahead.
        objective: Name of the further objective that was compared; empty for fitness.
    """

    difference: float
    error: float
    prompts: int
    p: float
    objective: str = ""

    def significant(self, level: float) -> bool:
        """Return whether the first agent is ahead with a p-value of at most `level`."""
        return self.p <= level


def compare(first: Score, second: Score) -> Comparison:
    """Compare two scores over the same prompts, in the same order.

    Differences per prompt cancel the variance that comes from some prompts being harder than
    others. Prompts where either `per_prompt` is NaN are left out. The test is the one-sided paired
    sign-flip test (Fisher 1935, The Design of Experiments, section 21): if both agents are equally
    good, each difference has either sign with the same probability. The test is exact for up to
    `EXACT` prompts with a difference. Above that, sign patterns are sampled from a fixed stream, so
    equal scores give equal p-values.
    """
    if len(first.per_prompt) != len(second.per_prompt):
        return Comparison(first.mean - second.mean, math.nan, 0, 1.0)
    differences = np.subtract(first.per_prompt, second.per_prompt, dtype=np.float64)
    differences = differences[np.isfinite(differences)]
    count = len(differences)
    if count == 0:
        return Comparison(math.nan, math.nan, 0, 1.0)
    error = float(differences.std(ddof=1) / np.sqrt(count)) if count > 1 else math.nan
    return Comparison(float(differences.mean()), error, count, _chance(differences))


def _chance(differences: np.ndarray) -> float:
    """Return the fraction of sign patterns whose sum is at least the observed one."""
    moved = differences[differences != 0]
    total = moved.sum()
    if total <= 0:
        return 1.0
    sums = _signs(len(moved)) @ moved
    reached = int((sums >= total * (1 - 1e-12)).sum())
    if len(moved) <= EXACT:
        return reached / len(sums)
    return (1 + reached) / (1 + len(sums))


@lru_cache(maxsize=4)
def _signs(count: int) -> np.ndarray:
    """Return sign patterns (patterns, count) of -1.0 and 1.0: all of them for `count` <= EXACT."""
    if count <= EXACT:
        patterns = np.arange(2**count)[:, None] >> np.arange(count) & 1
    else:
        patterns = np.random.default_rng(count).integers(0, 2, (_DRAWS, count))
    return 2.0 * patterns - 1.0
