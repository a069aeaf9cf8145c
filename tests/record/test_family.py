"""The family tree and the schedule of a member, from records alone."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_runs import make_run

from evo_grpo.errors import RunNotFoundError
from evo_grpo.record.family import (
    ancestry,
    archived_agent,
    best_agent,
    best_ever,
    next_member_id,
    tree,
)

PROPERTY = settings(max_examples=40)


def everyone(members):
    for member in members:
        yield member
        yield from everyone(member.children)


@PROPERTY
@given(size=st.integers(2, 6), rounds=st.integers(1, 6), seed=st.integers(0, 1000))
def test_the_tree_holds_every_member_that_trained_once(size, rounds, seed):
    records = make_run(size, rounds, seed, failures=0.3)
    roots = tree(records)
    assert [root.id for root in roots] == list(range(size))
    members = {member.id: member for member in everyone(roots)}
    trained = [agent for record in records for agent in record.agents]
    assert len(list(everyone(roots))) == len(members)
    assert set(members) == {agent.member for agent in trained}
    for member in members.values():
        assert [child.id for child in member.children] == sorted(
            {agent.member for agent in trained if agent.parent == member.id}
        )
        life = [agent for agent in trained if agent.member == member.id]
        assert member.born == life[0].round
        assert member.fitness == tuple(a.score.mean if a.score else None for a in life)
        assert member.mutation == life[0].mutation
    last = {agent.member for agent in records[-1].agents}
    assert {member.id for member in members.values() if member.alive} == last


@PROPERTY
@given(size=st.integers(2, 6), rounds=st.integers(1, 6), seed=st.integers(0, 1000))
def test_the_ancestry_is_one_record_per_round_and_joins_up(size, rounds, seed):
    records = make_run(size, rounds, seed)
    for agent in records[-1].agents:
        path = ancestry(records, agent.member)
        assert [one.round for one in path] == list(range(rounds))
        assert path[-1] == agent
        for before, after in pairwise(path):
            assert after.member == before.member or after.parent == before.member
            if after.member == before.member:
                assert after.hparams == before.hparams
            else:
                values = before.hparams
                for name, (old, new) in after.mutation.changes.items():
                    assert values.get(name) == old
                    values = values.with_value(name, new)
                assert after.hparams == values


def test_a_member_that_is_gone_has_an_ancestry_up_to_its_end():
    records = make_run(size=4, rounds=5)
    for agent in records[1].agents:
        path = ancestry(records, agent.member)
        assert path[0].round == 0
        last = max(r.round for r in records for a in r.agents if a.member == agent.member)
        assert path[-1].round == last
        assert path[-1].member == agent.member


def test_an_unknown_member_is_named():
    with pytest.raises(RunNotFoundError, match=r"member 99: .*among \[0, 1\]"):
        ancestry(make_run(size=2, rounds=1), 99)
    with pytest.raises(RunNotFoundError, match=r"member 0: .*among none yet"):
        ancestry([], 0)
    assert tree([]) == ()


def test_the_next_id_is_above_all_that_were_ever_given():
    records = make_run(size=4, rounds=6)
    used = {a.member for r in records for a in r.agents} | {
        m.id for r in records for m in r.members
    }
    assert next_member_id(records) == max(used) + 1
    # Members that are about to train count too, also when they never come to it.
    assert next_member_id(records[:1]) == max(m.id for m in records[0].members) + 1
    assert next_member_id([]) == 0
    # So do those that somebody put out of a plan before they trained.
    assert next_member_id([*records[:-1], replace(records[-1], next_member=99)]) == 99


def decided(*after):
    """Six rounds that decide after these finished rounds."""
    records = make_run(3, 6, 1)
    return [replace(record, between=record.round + 1 not in after) for record in records]


def test_the_best_of_a_run_is_what_its_archive_holds():
    records = decided(2, 4, 6)
    held = records[1].agents[2]
    records[3] = replace(records[3], archived=(1, held.member))
    assert best_ever(records[:4]) == archived_agent(records[:4]) == held
    # Rounds that were left out do not matter.
    assert best_ever([records[1], records[3]]) == held
    own = records[3].agents[0]
    assert best_ever([records[1], replace(records[3], archived=(3, own.member))]) == own


def test_without_an_archive_rounds_in_between_count_only_where_there_are_no_others():
    records = decided(2, 4, 6)

    def best(*numbers):
        found = [best_agent(records[number]) for number in numbers]
        return max(found, key=lambda agent: agent.score.mean)

    assert best_ever(records) == best(1, 3, 5)
    assert best_ever(records[:1]) == best(0)
    assert archived_agent(records[:1]) is None, "nothing is archived before the first decision"
    assert archived_agent(records[:2]) == best(1)
    assert best_ever([]) is archived_agent([]) is None
