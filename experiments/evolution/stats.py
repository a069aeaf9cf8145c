"""Means over seeds with bootstrap intervals; differences are paired by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: Of the values.
        low: Lower end of the 95% interval; NaN from a single seed.
        high: Upper end.
        seeds: How many.
        ahead: Values above zero, for differences; those that are zero count half.
    """

    mean: float
    low: float
    high: float
    seeds: int
    ahead: float


def bootstrap(values: Sequence[float]) -> Estimate:
    """Estimate a mean: percentiles 2.5 and 97.5 of the means of resampled seeds.

    Args:
        values: One per seed, at least one.
    """
    table = np.asarray(values, dtype=np.float64)
    count = len(table)
    ahead = float((table > 0).sum() + (table == 0).sum() / 2)
    if count < 2:
        return Estimate(float(table.mean()), np.nan, np.nan, count, ahead)
    draws = np.random.default_rng(SEED).integers(count, size=(RESAMPLES, count))
    low, high = np.quantile(table[draws].mean(axis=1), (0.025, 0.975))
    return Estimate(float(table.mean()), float(low), float(high), count, ahead)


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate | None:
    """Estimate the mean of first − second over the seeds that both have; None where none is."""
    shared = sorted(set(first) & set(second))
    if not shared:
        return None
    return bootstrap([first[seed] - second[seed] for seed in shared])


def times_best(scores: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Count for each arm the seeds on which no other is better; those that tie share the seed.

    Args:
        scores: Arm -> seed -> score. Only seeds that all arms have are counted.
    """
    wins = dict.fromkeys(scores, 0.0)
    if not scores:
        return wins
    for seed in set.intersection(*(set(mine) for mine in scores.values())):
        top = max(mine[seed] for mine in scores.values())
        best = [arm for arm, mine in scores.items() if mine[seed] == top]
        for arm in best:
            wins[arm] += 1 / len(best)
    return wins
