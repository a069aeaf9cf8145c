"""Rewards of training as evidence: no lag, the level of the test holds, and it has more power."""

import numpy as np
import pytest

from evo_grpo.evolve.compare import WORTH, compare, with_training
from evo_grpo.types import Score

ROWS, SAMPLES = 32.0, 2


def score(rewards):
    rewards = np.asarray(rewards, dtype=np.float64)
    error = float(rewards.std(ddof=1) / np.sqrt(len(rewards)))
    return Score(float(rewards.mean()), error, len(rewards), tuple(map(float, rewards)))


FITNESS = score([1.0, 0.0, 1.0, 1.0, 0.5, 0.5])


def weight(prompts, steps, rows=ROWS, samples=SAMPLES):
    """The weight of the fitness beside the steps: by completions, of which steps count less."""
    own = prompts * samples
    return own / (own + steps * rows * WORTH)


def test_the_mean_is_that_of_both_by_the_completions_behind_them():
    found = with_training(FITNESS, [0.4] * 5, ROWS, SAMPLES)
    share = weight(6, 5)
    assert found.mean == pytest.approx(share * FITNESS.mean + (1 - share) * 0.4)
    assert (found.n, found.steps, len(found.per_prompt)) == (6, 5, 11)
    assert np.mean(found.per_prompt) == pytest.approx(found.mean)
    # More samples of each prompt weigh more, and more rows of a step less.
    more = with_training(FITNESS, [0.4] * 5, ROWS, 4 * SAMPLES)
    assert more.mean > found.mean > with_training(FITNESS, [0.4] * 5, 4 * ROWS, SAMPLES).mean


@pytest.mark.parametrize("steps", [4, 5, 12])
def test_an_agent_that_learns_at_a_steady_pace_has_no_lag(steps):
    # The reward of step n comes from the weights before it; the fitness from those after the last.
    pace, begin = 0.02, 0.3
    rewards = [begin + pace * step for step in range(steps)]
    now = begin + pace * (steps - 0.5)  # half a step after the last one
    found = with_training(FITNESS, rewards, ROWS, SAMPLES)
    share = weight(6, steps)
    assert found.mean == pytest.approx(share * FITNESS.mean + (1 - share) * now)


@pytest.mark.parametrize(
    "rewards",
    [[], [0.4] * 3, [0.4, None, 0.4, 0.4, 0.4], [0.4, 0.4, 0.4, 0.4, float("nan")]],
)
def test_missing_or_few_steps_leave_the_score_as_it_is(rewards):
    assert with_training(FITNESS, rewards, ROWS, SAMPLES) is FITNESS


def test_a_score_without_prompts_is_left_as_it_is():
    trained = Score(0.4, 0.1, 5)
    assert with_training(trained, [0.4] * 5, ROWS, SAMPLES) is trained


def test_a_comparison_counts_prompts_and_steps_apart():
    better = with_training(score([1.0, 0.0, 1.0, 0.5]), [0.5, 0.6, 0.6, 0.7, 0.7], ROWS, SAMPLES)
    worse = with_training(score([0.0, 0.0, 0.5, 0.5]), [0.4, 0.5, 0.6, 0.5, 0.6], ROWS, SAMPLES)
    found = compare(better, worse)
    assert (found.prompts, found.steps) == (4, 5)
    assert found.difference == pytest.approx(better.mean - worse.mean)
    plain = compare(score([1.0, 0.0, 1.0, 0.5]), score([0.0, 0.0, 0.5, 0.5]))
    assert plain.steps == 0


def pair(rng, gain, prompts=32, steps=12):
    """The scores of two agents on the same prompts, of which the first is better by `gain`."""
    chances, scores, trained = rng.beta(2, 2, prompts), [], []
    starts = rng.beta(2, 2, (steps, 8))
    for own in (gain, 0.0):
        level = np.clip(chances + own, 0, 1)
        scores.append(score(rng.binomial(SAMPLES, level) / SAMPLES))
        trained.append(rng.binomial(4, np.clip(starts + own, 0, 1)).mean(axis=1) / 4)
    more = [
        with_training(one, list(steps), ROWS, SAMPLES)
        for one, steps in zip(scores, trained, strict=True)
    ]
    return scores, more


def shares(gain, level=0.1, runs=1500):
    """How often the first agent counts as ahead: by its fitness, and with its training."""
    rng, found = np.random.default_rng(1), np.zeros(2)
    for _ in range(runs):
        found += [compare(*scores).significant(level) for scores in pair(rng, gain)]
    return found / runs


def test_two_equal_agents_are_called_different_as_often_as_the_level_says():
    plain, with_steps = shares(0.0)
    assert 0.05 < plain < 0.12
    assert 0.07 < with_steps < 0.12


def test_the_rewards_of_training_add_power():
    plain, with_steps = shares(0.08)
    assert with_steps > plain + 0.1


def test_prompts_without_a_reward_make_no_agent_better():
    known = [0.9] * 64
    some = [*known[:60], *[np.nan] * 4]
    whole = Score(0.9, 0.0, 64, tuple(known))
    part = Score(0.9, 0.0, 60, tuple(some))
    whole, part = (with_training(one, [0.9] * 24, ROWS, SAMPLES) for one in (whole, part))
    assert compare(whole, part).p == compare(part, whole).p == 1
