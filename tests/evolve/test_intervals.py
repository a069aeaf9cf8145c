"""Intervals of 95% hold the mean in 95 of 100 cases, also where values are few."""

import math

import numpy as np
import pytest

from evo_grpo.evolve.compare import compare
from evo_grpo.evolve.intervals import interval, student
from evo_grpo.types import Score

#: From a table of Student's t, two-sided 95%.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 29: 2.045, 255: 1.969}
CASES = 4000


@pytest.mark.parametrize(("degrees", "expected"), TABLE.items())
def test_quantiles_are_those_of_a_table(degrees, expected):
    assert student(0.975, degrees) == pytest.approx(expected, rel=2e-3)


def test_the_interval_lies_around_the_mean():
    low, high = interval(0.5, 0.1, 30)
    assert (low + high) / 2 == pytest.approx(0.5)
    assert high - low == pytest.approx(2 * 0.1 * 2.045, rel=2e-3)
    assert all(math.isnan(end) for end in interval(0.5, math.nan, 1))


def covered(draws, ends):
    """The share of cases whose interval holds 0, which is the truth."""
    return np.mean([low <= 0 <= high for low, high in map(ends, draws)])


def scores(draw):
    one, other = (Score(float(v.mean()), 0.0, len(v), tuple(map(float, v))) for v in draw)
    return compare(one, other)


@pytest.mark.parametrize("count", [2, 3, 6, 16, 64])
def test_paired_intervals_cover_what_they_claim(count):
    draws = np.random.default_rng(count).normal(size=(CASES, 2, count))

    def ends(draw):
        found = scores(draw)
        return interval(found.difference, found.error, found.prompts)

    def normal(draw):
        found = scores(draw)
        return found.difference - 1.96 * found.error, found.difference + 1.96 * found.error

    assert covered(draws, ends) == pytest.approx(0.95, abs=0.013)
    if count <= 6:  # where 1.96 would not do
        assert covered(draws, normal) < 0.91
