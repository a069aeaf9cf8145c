"""Which checkpoints stay: always those of the last round, and whoever was the best."""

from dataclasses import replace

import pytest

from evo_grpo.record.family import best_agent
from evo_grpo.record.retention import kept_checkpoints, kept_throughout
from evo_grpo.settings import RecordConfig


def of_rounds(records, *numbers):
    return {a.checkpoint for number in numbers for a in records[number].agents}


@pytest.mark.parametrize(
    ("policy", "rounds"),
    [("all", range(5)), ("last", [4]), (1, [4]), (3, [2, 3, 4]), (9, range(5))],
)
def test_whole_rounds_stay(make_run, policy, rounds):
    records = make_run(rounds=5)
    assert kept_checkpoints(records, policy) == of_rounds(records, *rounds)


def test_the_best_of_each_round_stays_beside_the_last(make_run):
    records = make_run(rounds=4)
    best = {best_agent(record).checkpoint for record in records[:3]}
    assert kept_checkpoints(records, "best") == of_rounds(records, 3) | best


def test_what_was_not_saved_is_not_kept(make_run):
    (record,) = make_run(rounds=1)
    agents = tuple(replace(agent, checkpoint=None) for agent in record.agents)
    assert kept_checkpoints([replace(record, agents=agents)], "best") == set()


@pytest.mark.parametrize(
    ("policies", "rounds"),
    [
        ([(5, "all")], range(5)),
        ([(2, "last"), (5, "all")], [1, 2, 3, 4]),
        ([(4, 2), (5, "all")], [2, 3, 4]),
        ([(2, "all"), (5, "last")], [4]),
        ([(0, "last"), (5, "all")], range(5)),
        ([(3, "last"), (3, "all"), (5, 3)], [2, 3, 4]),
    ],
)
def test_no_policy_brings_back_what_an_earlier_one_dropped(make_run, policies, rounds):
    records = make_run(rounds=5)
    assert kept_throughout(records, policies) == of_rounds(records, *rounds)


def test_policies_that_follow_one_another_keep_what_they_would_round_by_round(make_run):
    records, changes = make_run(rounds=8), {0: "all", 2: "best", 4: 3, 6: "best", 7: "all"}
    there, policy = set(), "all"
    for number, record in enumerate(records):
        policy = changes.get(number, policy)
        played = records[:number]
        there &= kept_checkpoints(played, policy)  # as a resume does
        there |= {agent.checkpoint for agent in record.agents}
        there &= kept_checkpoints(records[: number + 1], policy)
    policies = [(2, "all"), (4, "best"), (6, 3), (7, "best"), (8, "all")]
    assert kept_throughout(records, policies) == there


def test_no_round_keeps_nothing():
    assert kept_checkpoints([], "last") == set()


def test_the_best_ever_has_a_copy_unless_all_stay():
    records = [RecordConfig(checkpoints=policy) for policy in ("all", "last", "best", 2)]
    assert [r.keeps_best_apart(archive=False) for r in records] == [False, True, True, True]
    assert records[0].keeps_best_apart(archive=True)
