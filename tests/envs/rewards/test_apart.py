"""The mean of each reward function by itself."""

import numpy as np
import pytest

from evo_grpo.envs.rewards.scoring import reward_of_each

NAN = float("nan")


def test_means_leave_out_what_abstained():
    rewards = np.array([[1.0, 5.0, NAN], [0.0, NAN, NAN], [1.0, 1.0, NAN]])
    assert reward_of_each(["a", "b", "c"], rewards) == {
        "reward/a": pytest.approx(2 / 3),
        "reward/b": 3.0,
    }


def test_one_function_is_the_reward_itself():
    assert reward_of_each(["a"], np.ones((2, 1))) == {}
    assert reward_of_each([], np.ones((2, 1))) == {}
