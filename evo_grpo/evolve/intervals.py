"""95% confidence intervals of means of few values, by Student's t."""

import math
from statistics import NormalDist

LEVEL = 0.95
"""Confidence level of the intervals."""


def interval(mean: float, error: float, count: int) -> tuple[float, float]:
    """Return the confidence interval (low, high) of a mean of `count` independent values.

    `error` is the standard error of the mean. Both ends are NaN for fewer than two values.
    """
    return around(mean, error, count - 1)


def around(mean: float, error: float, degrees: int) -> tuple[float, float]:
    """Return the confidence interval of a mean whose `error` has `degrees` degrees of freedom."""
    if degrees < 1:
        return math.nan, math.nan
    reach = error * student(0.5 + LEVEL / 2, degrees)
    return mean - reach, mean + reach


def student(p: float, degrees: int) -> float:
    """Return the p-quantile of Student's t distribution.

    The quantile is exact for one and two degrees of freedom; otherwise it is the expansion 26.7.5
    of Abramowitz and Stegun, within 0.2% at p = 0.975.
    """
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    if degrees == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))
