"""Generations: ids are never reused, parents are where they are said to be, values follow."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evo_grpo.errors import ShapeError
from evo_grpo.evolve.generation import next_generation
from evo_grpo.evolve.mutate import Mutations
from evo_grpo.evolve.select import Offspring, TournamentSelection
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
from evo_grpo.types import Member, Mutation, Score

PROPERTY = settings(derandomize=True, deadline=None, max_examples=100)
CONFIG = HyperparameterConfig(lr=RLParameter(1e-6, 1e-2), group_size=RLParameter(2, 16))
NEVER = Mutations(no_mutation=1, rl_hp=0)
ALWAYS = Mutations(no_mutation=0, rl_hp=1)


def founders(size):
    return [Member(slot, slot) for slot in range(size)]


def step(plan, members, hparams, mutations=NEVER, **options):
    rng = np.random.default_rng(0)
    return next_generation(
        plan, members, hparams, mutations, CONFIG, rng, **{"round": 0, "next_id": 10, **options}
    )


@PROPERTY
@given(
    size=st.integers(2, 8),
    rounds=st.integers(1, 8),
    seed=st.integers(0, 2**32),
    mutate_elite=st.booleans(),
)
def test_lives_are_consistent_over_many_rounds(size, rounds, seed, mutate_elite):
    rng = np.random.default_rng(seed)
    selection = TournamentSelection(min(2, size), True, size)
    mutations = Mutations(mutate_elite=mutate_elite)
    members, hparams = founders(size), [Hparams() for _ in range(size)]
    next_id, seen = size, {member.id for member in members}
    for number in range(rounds):
        means = rng.random(size)
        plan = selection.plan([[Score(mean, 0.0, 1)] for mean in means], rng)
        new = next_generation(
            plan, members, hparams, mutations, CONFIG, rng, round=number, next_id=next_id
        )
        assert [member.agent for member in new.members] == list(range(size))
        born = [member for member in new.members if member.born == number + 1]
        assert len({member.id for member in new.members}) == size
        assert seen.isdisjoint(member.id for member in born), "ids are never reused"
        assert [member.id for member in born] == list(range(next_id, new.next_id))
        for slot, (member, parent) in enumerate(zip(new.members, new.parents, strict=True)):
            source = members[parent]
            if member in born:
                assert member.parent == source.id
                assert member.mutation.op == ("mutate" if member.mutation.changes else "clone")
            else:
                assert member == members[slot]
                assert parent == slot
                assert new.hparams[slot] == hparams[slot]
            expected = hparams[parent]
            for name, (old, value) in member.mutation.changes.items() if member in born else ():
                assert expected.get(name) == old
                expected = expected.with_value(name, value)
            assert new.hparams[slot] == expected
        elite = int(np.argmax(means))
        assert new.parents[elite] == elite
        assert mutate_elite or new.members[elite] == members[elite]
        seen |= {member.id for member in new.members}
        members, hparams, next_id = new.members, new.hparams, new.next_id


def test_copies_and_survivors_without_mutation():
    hparams = [Hparams(lr=1e-3), Hparams(lr=1e-4), Hparams(lr=1e-5)]
    plan = (Offspring(0, 0, elite=True), Offspring(1, 0), Offspring(2, 2))
    new = step(plan, founders(3), hparams, round=4)
    assert new.members == (
        Member(0, 0),
        Member(10, 1, parent=0, born=5, mutation=Mutation("clone")),
        Member(2, 2),
    )
    assert new.hparams == (hparams[0], hparams[0], hparams[2])
    assert new.parents == (0, 0, 2)
    assert new.next_id == 11


def test_a_survivor_that_mutates_begins_a_new_life():
    plan = (Offspring(0, 0, elite=True), Offspring(1, 1))
    new = step(plan, founders(2), [Hparams(), Hparams()], ALWAYS)
    assert new.members[0] == Member(0, 0)
    child = new.members[1]
    assert (child.id, child.agent, child.parent, child.born) == (10, 1, 1, 1)
    assert child.mutation.op == "mutate"
    ((name, (_, value)),) = child.mutation.changes.items()
    assert new.hparams[1] == Hparams().with_value(name, value)


def test_the_elite_mutates_when_asked():
    plan = (Offspring(0, 0, elite=True), Offspring(1, 1))
    mutations = Mutations(no_mutation=0, rl_hp=1, mutate_elite=True)
    new = step(plan, founders(2), [Hparams(), Hparams()], mutations)
    assert [member.id for member in new.members] == [10, 11]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([Offspring(0, 0)], r"each of 2 slots, in order, got offspring for slots \[0\]"),
        ([Offspring(1, 1), Offspring(0, 0)], r"got offspring for slots \[1, 0\]"),
        ([Offspring(0, 1), Offspring(1, 0)], r"slot 0 copies slot 1, expected one that survives"),
        ([Offspring(0, 0), Offspring(1, 2)], r"slot 1 copies slot 2.*among 0..1"),
    ],
)
def test_plans_that_lose_an_agent_are_refused(plan, message):
    with pytest.raises(ShapeError, match=message):
        step(plan, founders(2), [Hparams(), Hparams()])


def test_hparams_for_every_slot_are_needed():
    with pytest.raises(ShapeError, match="and 1 Hparams"):
        step([Offspring(0, 0), Offspring(1, 1)], founders(2), [Hparams()])
