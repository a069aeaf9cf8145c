"""Fitness: shared prompts and draws, weights and abstentions, and an honest error."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from small_run import small

from evo_grpo.envs.protocol import Experience
from evo_grpo.evolve.compare import compare
from evo_grpo.evolve.intervals import interval
from evo_grpo.population.evaluate import (
    Evaluation,
    by_function,
    equal_starts,
    evaluate,
    evaluate_here,
    merged,
    pass_at,
    summarise,
    undecided,
    units_of,
    weighted,
)
from evo_grpo.training.assemble import prepare
from evo_grpo.types import Prompt, RewardScore

NAN = float("nan")


def test_weights_add_up_over_what_did_not_abstain():
    rewards = np.array([[1.0, 2.0], [NAN, 2.0], [1.0, NAN], [NAN, NAN]])
    total = weighted(rewards, np.array([1.0, 0.5]))
    np.testing.assert_array_equal(total, [2.0, 1.0, 1.0, NAN])


def test_the_error_is_taken_over_prompts():
    # Two prompts that always agree with themselves: four samples are no more than two.
    score = summarise(np.array([1.0, 1.0, 0.0, 0.0]), range(2))
    assert score.mean == 0.5
    assert score.se == pytest.approx(np.std([1, 0], ddof=1) / math.sqrt(2))
    assert score.n == 2
    assert score.per_prompt == (1.0, 0.0)


def test_abstentions_leave_mean_and_error():
    score = summarise(np.array([1.0, NAN, NAN, NAN, 0.0, 1.0]), range(3))
    assert score.mean == pytest.approx(0.75)
    assert score.n == 2
    assert score.se == pytest.approx(np.std([1, 0.5], ddof=1) / math.sqrt(2))
    nothing = summarise(np.full(4, NAN), range(2))
    assert math.isnan(nothing.mean)
    assert nothing.n == 0


def test_one_prompt_is_judged_by_its_samples():
    score = summarise(np.array([1.0, 0.0, 0.0, 1.0]), range(1))
    assert score.mean == 0.5
    assert score.se == pytest.approx(np.std([1, 0, 0, 1], ddof=1) / 2)
    assert math.isnan(summarise(np.array([1.0]), range(1)).se)  # one sample has no spread


def test_each_reward_function_has_a_score_of_its_own():
    """Over two prompts with two answers each; the second function abstains on one prompt."""
    rewards = np.array([[1.0, 5.0], [0.0, 7.0], [1.0, NAN], [1.0, NAN]])
    first, second = by_function(("exact", "length"), rewards, range(2))
    assert (first.name, first.mean, first.n) == ("exact", 0.75, 2)
    assert first.se == pytest.approx(np.std([0.5, 1], ddof=1) / math.sqrt(2))
    assert (second.name, second.mean, second.n) == ("length", 6.0, 1)
    assert by_function((), rewards, range(2)) == ()


@pytest.fixture(scope="module")
def prepared():
    return prepare(small())


def call(prepared, slots, **given):
    return evaluate(
        prepared.cohort,
        prepared.env,
        slots,
        prepared.env.prompts("validation", 5),
        **{"samples": 2, "temperature": 1.0, "stream": ("x",), **given},
    )


def test_equal_policies_get_equal_samples_whoever_else_is_there(prepared):
    base, first, second = call(prepared, [None, 0, 1])
    texts = [[t.text for t in e.experience.trajectories] for e in (base, first, second)]
    assert texts[0] == texts[1] == texts[2]  # no agent has learned yet
    assert base.score == first.score == second.score
    (alone,) = call(prepared, [1])
    assert alone.score == second.score
    assert len(first.rewards) == 10
    assert first.score.mean == pytest.approx(first.rewards.mean())


def test_greedy_answers_are_the_likeliest_ones_and_one_for_each_prompt(prepared):
    fitness = prepared.round_settings.evolve.fitness.replace(samples=3, temperature=0.0)
    starts = prepared.env.prompts("validation", 5)
    found = evaluate_here(prepared.cohort, prepared.env, [0], starts, fitness, stream=("x",))[0]
    (cold,) = call(prepared, [0], samples=1, temperature=1e-4, stream=("other",))
    texts = [[t.text for t in one.experience.trajectories] for one in (found, cold)]
    assert len(texts[0]) == 5
    assert texts[0] == texts[1]


def passes(rewards, k, correct=1.0):
    """pass@k by counting the sets of k completions; None where there are too few."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    sets = list(combinations(known, k))
    return (
        sum(any(reward >= correct for reward in one) for one in sets) / len(sets) if sets else None
    )


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_counts_the_sets_with_a_correct_completion(k):
    rng = np.random.default_rng(k)
    table = rng.choice([0.0, 0.5, 1.0, 1.2, NAN], (40, 5), p=[0.5, 0.2, 0.1, 0.1, 0.1])
    expected = [value for row in table.tolist() if (value := passes(row, k)) is not None]
    found = pass_at(table.reshape(-1), range(40), k, 1.0)
    assert found.mean == pytest.approx(np.mean(expected))
    assert found.se == pytest.approx(np.std(expected, ddof=1) / math.sqrt(len(expected)))
    assert found.n == len(expected)


def test_an_agents_own_sampling_settings_do_not_touch_its_fitness(prepared):
    (before,) = call(prepared, [0])
    hparams = prepared.cohort.agents[0].hparams
    prepared.cohort.set_hparams(0, hparams.replace(temperature=0.1, top_k=1, group_size=6))
    (after,) = call(prepared, [0])
    prepared.cohort.set_hparams(0, hparams)
    assert before.score == after.score
    assert before.experience.trajectories == after.experience.trajectories
    (cold,) = call(prepared, [0], temperature=0.01)
    assert cold.experience.trajectories != after.experience.trajectories


PROMPTS = 40


def evaluation(right):
    rewards = np.array([1.0] * right + [0.0] * (PROMPTS - right))
    units = tuple(range(PROMPTS))
    return Evaluation(summarise(rewards, units), Experience((), rewards[:, None]), rewards, units)


def test_rows_with_equal_prompts_are_one_prompt():
    prompts = [Prompt(n, text, (1,)) for n, text in enumerate(["b", "a", "b", "b", "c"])]
    assert equal_starts(prompts) == (0, 1, 0, 0, 2)
    assert equal_starts([7, 7, 5]) == (0, 0, 1), "seeds of episodes"
    score = summarise(np.array([1.0, 0.2, 0.0, NAN, NAN]), equal_starts(prompts))
    assert score.per_prompt[:2] == (0.5, 0.2)
    assert math.isnan(score.per_prompt[2])
    assert score.n == 2, "the third has no reward"
    assert score.mean == 0.35
    assert score.se == pytest.approx(0.15)


class Questions:
    """An environment of these prompts, of which the first are those of validation."""

    def __init__(self, *texts):
        self.texts = texts

    def prompts(self, split, size=None):
        assert split == "train"
        return [Prompt(n, text, (1,)) for n, text in enumerate(self.texts)][:size]


def test_answers_count_where_a_task_has_one_prompt_in_all():
    asked = [Prompt(n, "a", (1,)) for n in range(3)]
    assert units_of(Questions("a", "a"), asked) == (0, 1, 2)
    assert units_of(Questions("a", "b"), asked) == (0, 0, 0), "one prompt of several was held out"
    assert units_of(Questions("a"), asked[:1]) == (0,)


def test_equal_rewards_in_another_order_are_equal_to_the_last_bit():
    rng = np.random.default_rng(0)
    for _ in range(300):
        values = rng.choice([0.1, 0.2, 0.3, 0.7, 0.9], 32)
        one, other = (summarise(v, range(32)) for v in (values, rng.permutation(values)))
        assert one.mean == other.mean
        assert compare(one, other).difference == 0
        assert compare(one, other).p == 1


@pytest.mark.parametrize(("prompts", "rows"), [(8, 20), (20, 5), (64, 1)])
def test_the_interval_of_a_score_covers_the_truth_however_often_prompts_repeat(prompts, rows):
    """Normal rewards with a part that all answers to a prompt share; 95% within 1.5 points."""
    rng = np.random.default_rng(prompts + rows)
    units = tuple(np.tile(np.arange(prompts), rows).tolist())
    inside = 0
    for _ in range(2000):
        shared = rng.normal(size=prompts)
        rewards = np.tile(shared, rows) + rng.normal(size=prompts * rows)
        score = summarise(rewards, units)
        low, high = interval(score.mean, score.se, score.n)
        inside += low <= 0 <= high
    assert 0.935 <= inside / 2000 <= 0.965


def test_who_is_near_the_border_is_undecided():
    results = {slot: evaluation(right) for slot, right in enumerate((39, 20, 19, 1))}
    assert undecided(results, keep=2) == [1, 2]
    assert undecided(results, keep=1) == [0, 1, 2], "the border runs between 39 and 20"
    assert undecided(results, keep=4) == [0], "with room for all, who is the best counts"
    results[1] = evaluation(38)
    assert undecided(results, keep=4) == [0, 1]
    broken = evaluation(0)
    results[0] = replace(broken, score=summarise(broken.rewards * np.nan, broken.units))
    assert undecided(results, keep=4) == [1]


def test_a_second_look_is_averaged_with_the_first_by_prompt():
    own = (RewardScore("exact", 0.5, 0.1, PROMPTS),)
    one, more = replace(evaluation(20), tokens=7), replace(evaluation(10), tokens=5)
    one = replace(one, score=replace(one.score, rewards=own))
    both = merged(one, more)
    expected = np.array([1.0] * 10 + [0.5] * 10 + [0.0] * 20)
    assert both.score.per_prompt == tuple(expected)
    assert both.score.mean == pytest.approx(expected.mean())
    assert both.score.se == pytest.approx(expected.std(ddof=1) / np.sqrt(PROMPTS))
    # No agent was chosen for the first look alone.
    assert both.score.rewards == own
    assert both.score.first_look == one.score.per_prompt != both.score.per_prompt
    assert one.score.first_look == ()
    again = merged(both, more)
    assert (again.tokens, again.looks) == (17, 3)
    assert again.score.first_look == one.score.per_prompt
