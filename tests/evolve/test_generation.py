"""Generations: ids are never reused, parents are where they are said to be, values follow."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evo_grpo.errors import ShapeError
from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.on_copy import NoExploration
from evo_grpo.evolve.generation import check_plan, next_generation
from evo_grpo.evolve.protocols import Offspring, Trial
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
from evo_grpo.types import Member, Mutation, Score

PROPERTY = settings(max_examples=40)
CONFIG = HyperparameterConfig(lr=RLParameter(1e-6, 1e-2), group_size=RLParameter(2, 16))
NEVER = NoExploration()
ALWAYS = Mutations(step="factors")


class Watching:
    """An exploration that remembers whom it was given, and changes nobody."""

    def __init__(self):
        self.seen = []

    def explore(self, candidate, hp_config, rng):
        self.seen.append(candidate)
        return candidate.hparams


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
    kind=st.sampled_from(["between", "factors"]),
    mutate_elite=st.booleans(),
    shrinks=st.booleans(),
)
def test_lives_are_consistent_over_many_rounds(size, rounds, seed, kind, mutate_elite, shrinks):
    rng = np.random.default_rng(seed)
    selection, mutations = TournamentSelection(), Mutations(step=kind, mutate_elite=mutate_elite)
    mutate_elite = mutate_elite and kind == "factors"
    members, hparams = founders(size), [Hparams() for _ in range(size)]
    next_id, seen, trials = size, {member.id for member in members}, []
    for number in range(rounds):
        means = rng.random(len(members))
        places = int(rng.integers(1, len(members) + 1)) if shrinks else len(members)
        plan = selection.plan([[Score(mean, 0.0, 1)] for mean in means], places, rng)
        trials += [Trial(one, mean, number) for one, mean in zip(hparams, means, strict=True)]
        new = next_generation(
            plan, members, hparams, mutations, CONFIG, rng,
            round=number, next_id=next_id, trials=trials,
        )  # fmt: skip
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


def test_agents_keep_their_numbers_when_others_leave():
    members = [Member(id=number, agent=slot) for number, slot in enumerate((2, 5, 7))]
    hparams = [Hparams(lr=lr) for lr in (1e-3, 1e-4, 1e-5)]
    new = step((Offspring(0, 2), Offspring(2, 2)), members, hparams)
    assert new.slots == (2, 7)
    assert new.parents == (7, 7)
    assert new.members == (Member(10, 2, 2, 1, Mutation("clone")), members[2])
    assert new.hparams == (hparams[2], hparams[2])


def test_of_agents_alike_one_keeps_its_values_and_the_others_are_twins():
    one, other = Hparams(lr=1e-3), Hparams(lr=1e-4)
    cases = (
        # Two copies of the best agent, and a survivor of its own.
        ((Offspring(0, 0, elite=True), Offspring(1, 0), Offspring(2, 2)), (one, one, other), [1]),
        # The best agent keeps its values, wherever it stands among those alike.
        ((Offspring(0, 0), Offspring(1, 1, elite=True), Offspring(2, 2)), (one,) * 3, [0, 2]),
        # Of survivors alike, the first one keeps them, and a copy never does.
        ((Offspring(0, 1), Offspring(1, 1), Offspring(2, 2)), (other, one, one), [0, 2]),
        ((Offspring(0, 0), Offspring(1, 1)), (one, other), []),
    )
    for plan, hparams, twins in cases:
        watching = Watching()
        step(plan, founders(len(plan)), list(hparams), watching)
        assert [n for n, found in enumerate(watching.seen) if found.twin] == twins
        assert [n for n, found in enumerate(watching.seen) if found.shares] == twins


def test_a_copy_of_an_agent_that_does_not_stay_is_a_twin_of_its_other_copies():
    watching = Watching()
    plan = (Offspring(0, 2), Offspring(1, 2))
    step(plan, founders(3), [Hparams(lr=lr) for lr in (1e-5, 1e-4, 1e-3)], watching)
    assert [found.twin for found in watching.seen] == [False, True]


def test_agents_that_began_alike_are_spread_over_all_ranges_as_a_latin_hypercube():
    space = HyperparameterConfig(lr=RLParameter(1e-6, 1e-2), beta=RLParameter(0.0, 0.2))
    size, start = 8, Hparams(lr=1e-4, beta=0.0)
    plan = tuple(Offspring(n, n, elite=n == 3) for n in range(size))
    new = next_generation(
        plan, founders(size), [start] * size, Mutations(), space, np.random.default_rng(5),
        round=0, next_id=size, trials=[Trial(start, 0.5, 0)] * size,
    )  # fmt: skip
    assert new.hparams[3] == start
    others = [one for n, one in enumerate(new.hparams) if n != 3]
    of_lr = sorted(int((np.log10(one.lr) + 6) / 4 * 7) for one in others)
    of_beta = sorted(int(one.beta / 0.2 * 7 - 1e-9) for one in others)
    assert of_lr == of_beta == list(range(7)), "each seventh of a range has one agent"


def test_copies_of_one_agent_take_different_parts_of_its_gap():
    space = HyperparameterConfig(lr=RLParameter(1e-6, 1e-2))
    hparams = [Hparams(lr=lr) for lr in (1e-4, 1e-6, 1e-2, 1e-5)]
    plan = (Offspring(0, 0, elite=True), *(Offspring(n, 0) for n in (1, 2, 3)))
    trials = [Trial(one, 0.5, 0) for one in hparams]
    new = next_generation(
        plan, founders(4), hparams, Mutations(), space, np.random.default_rng(2),
        round=0, next_id=4, trials=trials,
    )  # fmt: skip
    low, high = -4.5, -3.0  # the middles of the gaps to 1e-5 and 1e-2
    shares = [(np.log10(one.lr) - low) / (high - low) for one in new.hparams[1:]]
    assert sorted(int(share * 3 - 1e-9) for share in shares) == [0, 1, 2]


def test_shares_of_twins_take_nothing_from_the_stream_of_the_exploration():
    states = []

    class Drawing:
        def explore(self, candidate, hp_config, rng):
            states.append(rng.random())
            return candidate.hparams

    alike, unlike = [Hparams()] * 2, [Hparams(lr=1e-4), Hparams(lr=1e-3)]
    for hparams in (alike, unlike):
        step((Offspring(0, 0), Offspring(1, 1)), founders(2), hparams, Drawing())
    assert states[:2] == states[2:]


# --- what strategies of a user return -------------------------------------------------------------

SPACE = HyperparameterConfig(
    batch_size=RLParameter(4, 64), loss_type=RLParameter(choices=["grpo", "dapo"])
)
OLD = Hparams(loss_type="grpo")


class Mine:
    def __init__(self, answer):
        self.answer = answer

    def explore(self, candidate, hp_config, rng):
        return self.answer


def explored(answer, old=OLD):
    rng, plan = np.random.default_rng(0), (Offspring(0, 0),)
    return next_generation(plan, founders(1), [old], Mine(answer), SPACE, rng, round=0, next_id=1)


@pytest.mark.parametrize(
    ("new", "changes"),
    [
        ({}, {}),
        ({"lr": np.float64(2e-4), "temperature": 0.9}, {"lr": 2e-4, "temperature": 0.9}),
        ({"clip_coef": (1.3, 1.4)}, {"clip_low": 1.3, "clip_high": 1.4}),
        ({"loss_type": "dapo", "group_size": np.int64(4)}, {"group_size": 4, "loss_type": "dapo"}),
        ({"batch_size": 8}, {"batch_size": 8}),  # None counts as the maximum
        ({"batch_size": 64}, {}),
    ],
)
def test_changes_are_computed_in_plain_values(new, changes):
    (member,), (hparams,) = (found := explored(OLD.replace(**new))).members, found.hparams
    assert hparams == (OLD.replace(**new) if changes else OLD)
    assert member.id == (1 if changes else 0)
    assert {name: after for name, (_, after) in member.mutation.changes.items()} == changes
    for name, pair in member.mutation.changes.items():
        assert pair[0] == (64 if name == "batch_size" else OLD.get(name))
        assert {type(end) for end in pair} <= {int, float, str}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "expected an evo_grpo.Hparams, got None; return the Hparams alone"),
        ((OLD, {}), r"expected an evo_grpo.Hparams, got \(Hparams\(.*; return the Hparams alone"),
        ({"lr": 1e-4}, "expected an evo_grpo.Hparams, got {'lr': 0.0001}"),
        (OLD.replace(loss_type="bnpo"), "loss_type: expected one of grpo, dapo, got 'bnpo'"),
        (OLD.replace(loss_type=None, lr=1e-4), ".*, got others in loss_type; change"),
        (OLD.replace(max_grad_norm=None), ".* got others in max_grad_norm"),
        (OLD.replace(lora_r=4, reward_weights={"a": 1}), r".* others in lora.r, reward_weights.a;"),
    ],
)
def test_what_is_no_exploration_is_refused_by_the_name_of_the_class(answer, message):
    with pytest.raises(ShapeError, match=f"^Mine.explore: {message}"):
        explored(answer)


def test_a_value_in_place_of_none_needs_a_range():
    with pytest.raises(ShapeError, match=r"got others in max_grad_norm; .* give what may change a"):
        explored(OLD, OLD.replace(max_grad_norm=None))


@pytest.mark.parametrize(
    "plan",
    [
        [Offspring(1, 1)],
        (one for one in [Offspring(0, 0), Offspring(2, 0)]),
        [Offspring(np.int64(0), np.int64(0)), Offspring(np.int64(1), np.int64(0), np.True_)],
    ],
)
def test_any_sequence_of_offspring_is_a_plan(plan):
    found = check_plan("Mine.plan", plan, 3, 3)
    assert 1 <= len(found) <= 2
    assert {type(one) for one in found} == {Offspring}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "expected a sequence of evo_grpo.Offspring, got None; return one for"),
        (Offspring(0, 0), r"expected a sequence of evo_grpo.Offspring, got Offspring\("),
        ([0, 1, 2], r"expected a sequence of evo_grpo.Offspring, got \[0, 1, 2\]"),
        ([Offspring(0, 3)], r"expected .* parents in 0..2, the indices of `histories`, got \[0, 3"),
        ([Offspring(-1, -1)], r"expected .* in 0..2.* got \[-1, -1\]"),
        ([Offspring(0.0, 0)], r"expected .* in 0..2.* got \[0.0, 0\]"),
        ([], r"expected 1 to 2 offspring at different positions.* got positions \[\]"),
        (
            [Offspring(1, 1), Offspring(0, 0)],
            r"expected .* ascending order, got positions \[1, 0\]",
        ),
        ([Offspring(1, 1), Offspring(1, 1)], r"expected .* different positions.* got .* \[1, 1\]"),
        ([Offspring(p, p) for p in range(3)], r"expected 1 to 2 offspring.*\[0, 1, 2\]"),
        ([Offspring(0, 1), Offspring(1, 0)], r"position 0 copies position 1.*its own parent: \[\]"),
        ([Offspring(0, 0), Offspring(1, 2)], r"position 1 copies position 2.*: \[0\]; an agent"),
    ],
)
def test_what_is_no_plan_is_refused_by_the_name_of_the_class(answer, message):
    with pytest.raises(ShapeError, match=f"^Mine.plan: {message}"):
        check_plan("Mine.plan", answer, 3, 2)
