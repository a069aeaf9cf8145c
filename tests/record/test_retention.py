"""Which checkpoints stay: always those of the last round, and whoever was the best."""

from dataclasses import replace

import pytest

from evo_grpo.record.leaderboard import best_agent
from evo_grpo.record.retention import kept_checkpoints
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


def test_no_round_keeps_nothing():
    assert kept_checkpoints([], "last") == set()


def test_the_best_ever_has_a_copy_unless_all_stay():
    records = [RecordConfig(checkpoints=policy) for policy in ("all", "last", "best", 2)]
    assert [r.keeps_best_apart(archive=False) for r in records] == [False, True, True, True]
    assert records[0].keeps_best_apart(archive=True)
