"""What went wrong in a run, with the remedy."""

import math
from dataclasses import replace

import pytest
from shown_run import SUMMARY, agent, small_config, two_rounds

from evo_grpo.record.records import RoundRecord
from evo_grpo.record.summary import winner_of
from evo_grpo.record.trouble import find_trouble
from evo_grpo.types import Decision


def changed(metrics, round=1, **more):
    """`two_rounds`, in one of which all agents have these metrics."""
    rounds = two_rounds()
    agents = tuple(replace(a, metrics={**a.metrics, **metrics}) for a in rounds[round].agents)
    rounds[round] = replace(rounds[round], agents=agents, **more)
    return rounds


def kinds(rounds):
    return [one.kind for one in find_trouble(rounds)]


def test_a_good_run_has_none():
    rounds = two_rounds()
    assert find_trouble(rounds, winner_of(rounds, SUMMARY), small_config().search_space()) == []
    assert find_trouble([]) == []


def test_a_failed_agent_is_told_once():
    failed = [
        RoundRecord(n, (agent(0, 0, n, 0.5), agent(1, 1, n, None, reason="no gradient")), {})
        for n in range(2)
    ]
    (one,) = find_trouble(failed)
    assert one.sentence.startswith("agent 1 failed in rounds 1 and 2 (no gradient): lower its lr")
    assert (one.kind, one.round, one.agent) == ("failed", 0, 1)


def test_a_collapsed_agent_is_told_with_its_round_and_not_again_for_its_kl():
    decision = Decision("collapsed", 1, None, math.nan, math.nan, 0, "agent 1 collapsed: its KL")
    rounds = changed({}, 0, decisions=(decision,))
    far = replace(rounds[0].agents[1], metrics={"kl": 12.0})
    rounds[0] = replace(rounds[0], agents=(rounds[0].agents[0], far))
    (one,) = find_trouble(rounds)
    assert one.sentence.startswith("after round 1 agent 1 collapsed: its KL: lower evolve.hyper")


def test_kl_that_explodes_names_agent_and_round_once():
    first, second = find_trouble([*changed({"kl": 5.25})])
    assert first.sentence == (
        "the KL divergence of agent 0 from the reference rose to 5.25 nats per token in round 2: "
        "raise algorithm.beta or lower its lr"
    )
    assert second.agent == 1
    assert kinds(changed({"kl": math.nan})) == []


def test_equal_rewards_are_told_from_where_they_last():
    (one,) = find_trouble(changed({"zero_variance": 0.95}))
    assert one.text.startswith("from round 2 on the completions of 95% of the groups had equal")
    assert "raise algorithm.group_size" in one.remedy
    (solved,) = find_trouble(changed({"zero_variance": 0.95, "reward": 0.99}))
    assert solved.remedy.startswith("the task is solved")
    assert kinds(changed({"zero_variance": 0.95}, 0)) == []  # it passed


def test_a_value_that_ended_at_a_bound_of_its_range():
    space = small_config("evolve.hyperparameters={lr: {min: 1e-4, max: 1.2e-3}}").search_space()
    rounds = two_rounds()
    (one,) = find_trouble(rounds, winner_of(rounds, SUMMARY), space)
    assert one.sentence == (
        "the best agent's lr ended at the max of its range, 1.2e-3: widen it: "
        "evolve.hyperparameters.lr.max"
    )
    # Before the end those of the best agent.
    assert find_trouble(rounds, winner_of(rounds, None), space) == [one]
    failed = [RoundRecord(0, (agent(0, 0, 0, None),), {})]
    found = find_trouble(failed, winner_of(failed, None), space)
    assert [one.kind for one in found] == ["failed"]


@pytest.mark.parametrize(
    ("metric", "value", "text", "remedy"),
    [
        ("ratio_max", 1234.0, "of agent 0 1,234 times in round 2", "lower its lr"),
        ("clip_fraction", 0.55, "55% of the tokens of agent 0 were clipped in round 2", "lower"),
        ("sampler_gap", 0.2, "0.2 nats per token off those of training in round 2", "native"),
    ],
)
def test_a_metric_beyond_its_bound_is_told_once_for_each_agent(metric, value, text, remedy):
    found = find_trouble(changed({metric: value}))
    assert [(one.kind, one.agent) for one in found] == [(metric, 0), (metric, 1)]
    assert text in found[0].text
    assert remedy in found[0].remedy
    assert kinds(changed({metric: math.nan})) == []
    assert kinds(changed({metric: 0.01})) == []


@pytest.mark.parametrize(
    ("rounds", "kind", "text", "remedy"),
    [
        (changed({"ended": 0.25}), "cut", "in round 2 75% of the completions were cut",
         "algorithm.max_output_tokens"),
        (changed({"dropped": 2.0}, 0), "dropped", "4 episodes had to be dropped, the first in "
         "round 1", "fix the environment"),
        (changed({"set_aside": 2.0}), "set_aside", "4 groups had to be set aside, the first in "
         "round 2", "fix the reward function"),
        (changed({}, 0, reduced={"engine.micro_batch_tokens": 2048}), "memory", "in round 1, which "
         "lowered engine.micro_batch_tokens to 2,048", "set that in the file"),
        ([changed({"entropy": 1.0}, 0)[0], changed({"entropy": 0.04})[1]], "entropy", "entropy "
         "fell from 1 to 0.04 nats per token", "raise algorithm.beta"),
    ],
)  # fmt: skip
def test_a_trouble_of_all_agents_is_told_once(rounds, kind, text, remedy):
    (one,) = find_trouble(rounds)
    assert one.kind == kind
    assert text in one.text
    assert remedy in one.remedy


def test_what_passed_or_is_small_is_no_trouble():
    assert kinds(changed({"ended": 0.25}, 0)) == []
    assert kinds([changed({"entropy": 1.0}, 0)[0], changed({"entropy": 0.06})[1]]) == []


def test_lora_dropout_explains_a_gap_between_sampler_and_trainer():
    rounds = changed({"sampler_gap": 0.2})
    told = [{one.kind for one in find_trouble(rounds, dropout=dropout)} for dropout in (0.0, 0.1)]
    assert told[0] - told[1] == {"sampler_gap"}
