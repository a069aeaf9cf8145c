"""What ends a run early follows from its records."""

import math
from dataclasses import replace

import pytest
from random_runs import make_run, with_scores

from evo_grpo.record.stopping import RoundTotals, rules_in_words, rules_that_hold, why_it_ended
from evo_grpo.settings.population import StopConfig
from evo_grpo.types import RewardScore, Score


def played(*best, tokens=0, seconds=0.0):
    """Rounds with these best fitness values; the last one as it is given to the rules."""
    records = make_run(size=2, rounds=len(best))
    rounds = [
        replace(
            with_scores(record, [value, None if value is None else value - 0.1]),
            started=100.0 * record.round,
            ended=100.0 * record.round + 60.0,
            evaluation_tokens=30,
        )
        for record, value in zip(records, best, strict=True)
    ]
    return rounds[:-1], RoundTotals.of(rounds[-1])


@pytest.mark.parametrize(
    ("rule", "best", "holds"),
    [
        # Of four prompts with a standard error of 0.05 the interval reaches 0.159 below the mean.
        ({"fitness": 0.9}, (0.5, 1.06), True),
        ({"fitness": 0.9}, (0.5, 1.05), False),
        ({"fitness": 0.9}, (1.2, 0.8), False),  # of this round, not of any
        ({"fitness": 0.9}, (0.5, None), False),
        ({"patience": 2}, (0.5, 0.5, 0.4), True),  # equal is not better
        ({"patience": 2}, (0.5, 0.4, 0.500001), False),
        ({"patience": 2}, (0.5, 0.4), False),
        ({"patience": 2}, (0.5, 0.6, 0.4, 0.7, 0.6), False),
        ({"patience": 2}, (0.5, 0.6, 0.4, 0.7, 0.6, None), True),
        ({"patience": 1}, (None, None), True),
        ({"patience": 1}, (0.5,), False),
        # Each round samples 300 tokens in training, 30 in its evaluation.
        ({"tokens": 660}, (0.5, 0.5), True),
        ({"tokens": 661}, (0.5, 0.5), False),
        ({"tokens": 5e2}, (0.5, 0.5), True),
        ({"minutes": 2}, (0.5, 0.5), True),
        ({"minutes": 2.01}, (0.5, 0.5), False),
        ({}, (0.5, 0.5), False),
    ],
)
def test_a_rule_holds(rule, best, holds):
    past, last = played(*best)
    assert rules_that_hold(StopConfig(**rule), past, last) == (tuple(rule) if holds else ())


@pytest.mark.parametrize(
    ("shares", "holds"),
    [
        ((0.5, 1.0, 1.0), True),
        ((1.0, 1.0), True),
        ((1.0, 0.9, 1.0), False),
        ((1.0,), False),
        ((1.0, None), False),  # an earlier version did not record it
    ],
)
def test_no_signal_counts_rounds_in_which_all_groups_of_all_agents_are_equal(shares, holds):
    """By the share of such groups of the second agent; all groups of the first one are."""
    rounds = []
    for record, share in zip(make_run(size=2, rounds=len(shares)), shares, strict=True):
        first, second = (replace(agent, metrics={}) for agent in record.agents)
        first.metrics["zero_variance"] = 1.0
        if share is not None:
            second.metrics["zero_variance"] = share
        rounds.append(replace(record, agents=(first, second)))
    *past, last = rounds
    assert rules_that_hold(StopConfig(no_signal=2), past, RoundTotals.of(last)) == (
        ("no_signal",) if holds else ()
    )


def scored(*means, n=9, steps=0, error=0.01):
    """The score of an agent with a reward function `a`, `b`, ... for each mean."""
    rewards = (RewardScore(name, m, error, n) for name, m in zip("abc", means, strict=False))
    return Score(sum(means), error, n, steps=steps, rewards=tuple(rewards))


@pytest.mark.parametrize(
    ("scores", "holds"),
    [
        ([scored(0.9, 0.5)], True),
        ([scored(0.81, 0.5)], False),  # its interval reaches below 0.8
        ([scored(0.9, 0.1), scored(0.5, 0.9)], False),  # no agent reaches both
        ([scored(0.9)], False),  # an earlier version did not measure it
        ([scored(0.9, 0.5, n=1, error=math.nan)], False),
        ([scored(0.9, 0.5, steps=8), None], False),  # rewards of training, in a round in between
    ],
)
def test_one_agent_surely_reaches_all_rewards_named(scores, holds):
    rules = StopConfig(rewards={"a": 0.8, "b": 0.4})
    assert rules_that_hold(rules, [], RoundTotals(scores, 1, 1.0)) == (
        ("rewards",) if holds else ()
    )


def test_judges_may_cost_so_much():
    rules = StopConfig(judge_cost=0.5)
    assert rules_that_hold(rules, [], RoundTotals([], 1, 1.0, judge_cost=0.5)) == ("judge_cost",)
    assert rules_that_hold(rules, [], RoundTotals([], 1, 1.0, judge_cost=0.49)) == ()


def test_all_that_hold_are_told():
    past, last = played(0.5, 0.5)
    rules = StopConfig(fitness=0.3, patience=1, minutes=99, tokens=1)
    assert rules_that_hold(rules, past, last) == ("fitness", "patience", "tokens")


def test_a_rule_that_had_ended_the_run_before_does_not_end_it_again():
    past, last = played(0.9, 0.9, 0.9)
    past[0] = replace(past[0], stopped=("fitness",), went_on=True)
    rules = StopConfig(fitness=0.5, patience=2)
    assert rules_that_hold(rules, past, last) == ("patience",)


def test_a_round_that_an_earlier_version_recorded_took_no_time():
    (record,) = make_run(size=2, rounds=1)
    assert RoundTotals.of(record).seconds == 0
    assert RoundTotals.of(with_scores(record, [None, None])).best == -math.inf


def test_rules_in_words():
    assert rules_in_words(StopConfig(no_signal=None)) == ""
    assert rules_in_words(StopConfig()) == (
        "3 rounds in a row had no group with different rewards to learn from"
    )
    assert rules_in_words(StopConfig(fitness=0.95, tokens=5e6, no_signal=None)) == (
        "the fitness of an agent is surely 0.95 or more, or 5,000,000 tokens are sampled"
    )
    assert rules_in_words(StopConfig(rewards={"a": 0.9, "b": 0}, no_signal=None)) == (
        "an agent surely reaches 0.9 in a and 0 in b"
    )
    summary = {"rounds": 3, "stopped": {"patience": 4}}
    assert why_it_ended(summary) == (
        "population.stop ended it after round 3: "
        "4 rounds in a row are no better than the best before them"
    )
    assert why_it_ended({"rounds": 3}) == why_it_ended({"rounds": 3, "stopped": {}}) == ""
