"""The soft overlong penalty against the formula of the paper, length by length."""

import numpy as np
import pytest

from evo_grpo.envs.protocol import Experience
from evo_grpo.learn.objective.shaping import (
    longest_completion,
    overlong_penalties,
    with_overlong_penalty,
)
from evo_grpo.types import Trajectory


def paper(length, longest, cache):
    """Equation 13 of DAPO."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@pytest.mark.parametrize(("longest", "buffer"), [(20, 5), (20, 20), (20, 1), (7, 3)])
def test_the_penalty_is_that_of_the_paper(longest, buffer):
    lengths = range(longest + 3)
    expected = [paper(length, longest, buffer) for length in lengths]
    assert overlong_penalties(lengths, longest, buffer).tolist() == pytest.approx(expected, abs=0)


def trajectory(mask, turns=1):
    return Trajectory("", "", tuple(range(len(mask))), tuple(map(bool, mask)), None, False, turns)


def test_the_length_of_an_episode_is_that_of_its_longest_completion():
    assert longest_completion(trajectory([0, 0, 1, 1, 1])) == 3
    assert longest_completion(trajectory([0, 1, 1, 0, 0, 1, 1, 1, 0, 1], turns=3)) == 3
    assert longest_completion(trajectory([0, 0], turns=2)) == 0


def test_a_row_without_a_reward_gets_none_by_its_length():
    rewards = np.array([[1.0, np.nan], [np.nan, np.nan], [0.0, 2.0]])
    made = with_overlong_penalty(
        Experience((), rewards, {"turns": 2.0}), np.array([-1.0, -1.0, -0.5]), weight=4.0
    )
    np.testing.assert_array_equal(made.rewards[:, :2], rewards)
    np.testing.assert_array_equal(made.rewards[:, 2], [-1.0, np.nan, -0.5])
    assert made.metrics == {"turns": 2.0, "overlong_penalty": -3.0}
