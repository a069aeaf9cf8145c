"""A run whose groups all have equal rewards says so after its first round, once."""

import logging
import warnings

import pytest
from small_run import small, stopped_and_resumed

from evo_grpo import run
from evo_grpo.population.stats import Tally, warn_without_signal, without_signal
from evo_grpo.types import Trajectory

NAN = float("nan")


def answer(prompt="1+1=", text="3"):
    return Trajectory(prompt, text, (), (), (), ended=True)


SAMPLES = ((answer(), 0.0),)


def tally(*steps, samples=SAMPLES):
    """What an agent did in steps of (share of groups with equal rewards, mean reward)."""
    metrics = [{"zero_variance": share, "reward": mean} for share, mean in steps]
    return Tally(metrics=metrics, samples=list(samples))


def test_equal_rewards_in_every_group_of_every_agent_name_causes_and_an_example():
    text = without_signal([tally((1.0, 0.0), (1.0, 0.0)), tally((1.0, 0.0))])
    assert text.startswith("round 1 had nothing to learn from: ")
    assert "all of them 0." in text
    for cause in ("reward is always the same", "too hard", "too easy", "temperature"):
        assert cause in text
    assert text.endswith("for instance prompt '1+1=', completion '3', reward 0")


@pytest.mark.parametrize(
    "tallies",
    [
        [tally((1.0, 0.0), (0.5, 0.1))],  # a step with a difference
        [tally((1.0, 0.0)), tally((0.75, 0.0))],  # an agent with one
        [tally((1.0, NAN))],  # all abstained, or were set aside: that has a warning of its own
        [Tally(metrics=[{"zero_variance": 1.0, "reward": 0.0, "empty_steps": 1.0}])],
        [Tally()],
    ],
)
def test_a_difference_or_no_reward_at_all_says_nothing(tallies):
    assert without_signal(tallies) == ""


def test_groups_may_differ_from_each_other():
    text = without_signal([tally((1.0, 0.25)), tally((1.0, 1.0))])
    assert "between 0.25 and 1 on average" in text


def test_a_step_without_episodes_does_not_count_as_one_with_a_difference():
    one = tally((1.0, 0.0))
    one.metrics.append({"zero_variance": 0.0, "reward": NAN, "empty_steps": 1.0})
    assert without_signal([one])


def test_the_example_is_cut_escaped_and_one_with_a_reward():
    samples = [(answer("hidden"), NAN), (answer("a\x1b[31m\nb\u202e", "long " * 100), 0.5)]
    text = without_signal([tally((1.0, 0.5), samples=()), tally((1.0, 0.5), samples=samples)])
    assert r"prompt 'a\x1b[31m\nb\u202e', completion 'long long" in text
    assert text.endswith("...', reward 0.5")
    assert text.isprintable()
    assert without_signal([tally((1.0, 0.5), samples=())]).endswith("for completions to differ")


def test_a_sentence_is_warned_of_and_logged(caplog):
    with pytest.warns(UserWarning, match="nothing to learn from"):
        warn_without_signal(without_signal([tally((1.0, 0.0))]))
    assert [(r.name, r.levelno) for r in caplog.records] == [
        ("evo_grpo.population.stats", logging.WARNING)
    ]
    warn_without_signal("")  # a warning would be an error here
    assert len(caplog.records) == 1


@pytest.fixture
def always_equal(monkeypatch):
    """A run whose only rewards are 1."""
    monkeypatch.setattr("evo_grpo.envs.builtin.sums.exact", lambda completion, answer: 1.0)
    return small()


@pytest.mark.slow
def test_a_run_warns_once_and_not_again_after_a_resume(always_equal, tmp_path):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(always_equal, out=tmp_path / "whole")
        stopped_and_resumed(always_equal, tmp_path / "parts", ("learn", 1))
    told = [str(one.message) for one in seen if "nothing to learn from" in str(one.message)]
    assert len(told) == 2, "one for each run"
    assert told[0] == told[1]
    assert "all of them 1. Either the reward is always the same" in told[0]
