"""The paired test against a slow one that enumerates, and its error against the definition."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_grpo.evolve.compare import compare
from evo_grpo.types import Score

NAN = float("nan")
rewards = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=9)


def score(*rewards):
    known = [r for r in rewards if not math.isnan(r)]
    return Score(sum(known) / len(known) if known else NAN, NAN, len(known), tuple(rewards))


def slow(differences):
    """All sign patterns, one by one."""
    total = math.fsum(differences)
    if total <= 0:
        return 1.0
    patterns = list(itertools.product((-1, 1), repeat=len(differences)))
    sums = [math.fsum(s * d for s, d in zip(p, differences, strict=True)) for p in patterns]
    return sum(s >= total - 1e-9 for s in sums) / len(patterns)


@given(rewards, st.data())
def test_few_prompts_are_tested_exactly(first, data):
    second = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(first)))
    second = second[: len(first)]
    differences = [a - b for a, b in zip(first, second, strict=True)]
    found = compare(score(*first), score(*second))
    assert found.p == pytest.approx(slow(differences))
    assert found.difference == pytest.approx(sum(differences) / len(first))
    assert found.prompts == len(first)


def test_more_prompts_are_tested_exactly_too():
    rng = np.random.default_rng(0)
    for _ in range(20):
        differences = rng.choice([-1.0, 0.0, 0.5, 1.0], 15, p=[0.2, 0.2, 0.3, 0.3])
        moved = differences[differences != 0]
        found = compare(score(*differences), score(*np.zeros(len(differences))))
        assert found.p == pytest.approx(slow(moved.tolist()))


def test_differences_of_any_size_get_no_smaller_chance_than_the_exact_one():
    rng = np.random.default_rng(0)
    for _ in range(10):
        differences = rng.normal(0.3, 1.0, 12)
        found = compare(score(*differences), score(*np.zeros(12)))
        exact = slow(differences.tolist())
        assert exact - 1e-12 <= found.p <= exact + 0.01


def test_the_chance_of_many_prompts_can_be_as_small_as_it_is():
    """A test at the level of the archive needs chances below those that can be sampled."""
    found = compare(score(*[1.0] * 40), score(*[0.0] * 40))
    assert found.p == pytest.approx(2.0**-40)


def test_equal_agents_are_called_different_as_often_as_the_level_says():
    rng = np.random.default_rng(1)
    pairs = rng.random((2000, 2, 64)) < rng.random((2000, 1, 64))
    wrong = sum(
        compare(score(*one.astype(float)), score(*other.astype(float))).significant(0.1)
        for one, other in pairs
    )
    assert 0.06 < wrong / 2000 < 0.13


def test_the_error_of_a_difference_is_that_of_the_prompts_differences():
    # One is a tenth better on every prompt: however far apart the prompts lie, that is certain.
    easy_and_hard = (0.0, 0.25, 0.5, 1.0)
    better = tuple(reward + 0.125 for reward in easy_and_hard)
    assert compare(score(*better), score(*easy_and_hard)).error == 0.0
    first, second = (0.0, 1.0, 0.0, 1.0), (1.0, 1.0, 0.0, 0.5)
    expected = np.std([1.0, 0.0, 0.0, -0.5], ddof=1) / math.sqrt(4)
    assert compare(score(*first), score(*second)).error == pytest.approx(expected)


def test_prompts_without_a_pair_are_left_out_and_one_pair_has_no_error():
    found = compare(score(1.0, 1.0, NAN, 1.0), score(0.0, NAN, 0.0, 1.0))
    assert found.prompts == 2
    assert found.error == pytest.approx(np.std([1.0, 0.0], ddof=1) / math.sqrt(2))
    assert math.isnan(compare(score(0.0, NAN), score(1.0, 1.0)).error)
    nothing = compare(score(0.0, 1.0), score(NAN, NAN))
    assert (nothing.prompts, nothing.p) == (0, 1.0)
    assert compare(score(1.0), score(0.0, 0.0)).p == 1.0, "scores over other prompts"
