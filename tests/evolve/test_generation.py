"""Generations: ids are never reused, parents are where they are said to be, values follow."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.none import NoExploration
from evo_grpo.evolve.explore.protocol import Trial
from evo_grpo.evolve.generation import next_generation
from evo_grpo.evolve.select.protocol import Offspring
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
from evo_grpo.types import Member, Mutation, Score

PROPERTY = settings(max_examples=40)
CONFIG = HyperparameterConfig(lr=RLParameter(1e-6, 1e-2), group_size=RLParameter(2, 16))
NEVER = NoExploration()
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
    shrinks=st.booleans(),
)
def test_lives_are_consistent_over_many_rounds(size, rounds, seed, mutate_elite, shrinks):
    rng = np.random.default_rng(seed)
    selection, mutations = TournamentSelection(), Mutations(mutate_elite=mutate_elite)
    members, hparams = founders(size), [Hparams() for _ in range(size)]
    next_id, seen = size, {member.id for member in members}
    for number in range(rounds):
        means = rng.random(len(members))
        places = int(rng.integers(1, len(members) + 1)) if shrinks else len(members)
        plan = selection.plan([[Score(mean, 0.0, 1)] for mean in means], places, rng)
        new = next_generation(
            plan, members, hparams, mutations, CONFIG, rng, round=number, next_id=next_id
        )
        before = {member.agent: (member, hp) for member, hp in zip(members, hparams, strict=True)}
        assert len(new.members) == places
        assert list(new.slots) == sorted(set(new.slots) & set(before)), "nobody new, in order"
        born = [member for member in new.members if member.born == number + 1]
        assert len({member.id for member in new.members}) == places
        assert seen.isdisjoint(member.id for member in born), "ids are never reused"
        assert [member.id for member in born] == list(range(next_id, new.next_id))
        for member, parent, values in zip(new.members, new.parents, new.hparams, strict=True):
            source, expected = before[parent]
            if member in born:
                assert member.parent == source.id
                assert member.mutation.op == ("mutate" if member.mutation.changes else "clone")
            else:
                assert (member, expected) == before[member.agent]
                assert parent == member.agent
                assert values == expected
            for name, (old, value) in member.mutation.changes.items() if member in born else ():
                assert expected.get(name) == old
                expected = expected.with_value(name, value)
            assert values == expected
        elite = members[int(np.argmax(means))]
        position = new.slots.index(elite.agent)
        assert new.parents[position] == elite.agent
        assert mutate_elite or new.members[position] == elite
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


def test_agents_keep_their_numbers_when_others_leave():
    members = [Member(id=number, agent=slot) for number, slot in enumerate((2, 5, 7))]
    hparams = [Hparams(lr=lr) for lr in (1e-3, 1e-4, 1e-5)]
    new = step((Offspring(0, 2), Offspring(2, 2)), members, hparams)
    assert new.slots == (2, 7)
    assert new.parents == (7, 7)
    assert new.members == (Member(10, 2, 2, 1, Mutation("clone")), members[2])
    assert new.hparams == (hparams[2], hparams[2])


def test_the_exploration_is_handed_the_trials():
    seen = []

    class Watching:
        def explore(self, candidate, hp_config, rng):
            seen.append(candidate.trials)
            return candidate.hparams, {}

    trials = (Trial(Hparams(), 0.5, 0),)
    step(
        (Offspring(0, 0), Offspring(1, 0)), founders(2), [Hparams()] * 2, Watching(), trials=trials
    )
    assert seen == [trials, trials]
