"""Mutation: values stay in range, do not drift, can leave 4 and 0, and one moves at a time."""

import math

import numpy as np
import pytest
from explorer_contract import INSIDE, PROPERTY, RANGES
from hypothesis import given
from hypothesis import strategies as st

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.protocol import Candidate
from evo_grpo.schema.hparams import MUTABLE
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

ALWAYS = Mutations(no_mutation=0, rl_hp=1)
WIDE = HyperparameterConfig(**RANGES)
seeds = st.integers(0, 2**32)


def explore(mutations, hparams, config, rng, **candidate):
    return mutations.explore(Candidate(hparams, **candidate), config, rng)


def walk(hparams, config, seed, steps=60, mutations=ALWAYS):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        new, changes = explore(mutations, hparams, config, rng)
        yield hparams, new, changes
        hparams = new


@PROPERTY
@given(seeds)
def test_values_never_leave_their_range_and_one_moves_at_a_time(seed):
    for old, new, changes in walk(INSIDE, WIDE, seed):
        assert len(changes) == 1
        ((name, (before, after)),) = changes.items()
        assert new == old.with_value(name, after)
        assert before != after
        if name != "batch_size" or old.batch_size is not None:
            assert before == old.get(name)
        bounds = WIDE[name]
        assert bounds.min <= after <= bounds.max
        assert isinstance(after, MUTABLE[name])


@PROPERTY
@given(seeds, st.booleans())
def test_a_clip_pair_moves_at_one_end_and_keeps_its_order(seed, by_distance):
    config = (
        HyperparameterConfig(clip_coef=RLParameter(min=0.05, max=0.5))
        if by_distance
        else HyperparameterConfig(
            clip_low=RLParameter(min=0.5, max=1.1), clip_high=RLParameter(min=0.9, max=1.5)
        )
    )
    moved = set()
    for _, new, changes in walk(INSIDE.replace(clip_coef=(0.8, 1.28)), config, seed):
        low, high = new.clip_coef
        assert low < high
        assert {"clip_low", "clip_high"} >= set(changes)
        assert 0.5 <= low <= (0.95 if by_distance else 1.1)
        assert (1.05 if by_distance else 0.9) <= high <= 1.5
        moved |= set(changes)
    assert moved == {"clip_low", "clip_high"}


def test_a_clip_end_moves_by_its_distance_from_one():
    config = HyperparameterConfig(clip_high=RLParameter(min=1.0001, max=1.01))
    start = INSIDE.replace(clip_coef=(0.9997, 1.0004))
    for _, new, changes in walk(start, config, 0, steps=1):
        (_, after) = changes["clip_high"]
        assert after - 1 == pytest.approx(0.0004 * 1.2) or after - 1 == pytest.approx(0.0004 * 0.8)
        assert new.clip_coef == (0.9997, after)


def test_a_scalar_becomes_a_pair_when_its_ends_mutate():
    config = HyperparameterConfig(clip_low=RLParameter(0.5, 0.95))
    for _, new, changes in walk(INSIDE, config, 0, steps=1):
        assert changes["clip_low"][0] == pytest.approx(0.8)
        assert new.clip_coef == (changes["clip_low"][1], 1.2)


def test_ends_that_would_meet_go_the_other_way_or_stay():
    # Each end may only take the value of the other one, or the one it has.
    config = HyperparameterConfig(clip_low=RLParameter(0.9, 1.2), clip_high=RLParameter(0.9, 1.2))
    for _, new, _ in walk(INSIDE.replace(clip_coef=(0.9, 1.2)), config, 3, steps=200):
        assert new.clip_bounds[0] < new.clip_bounds[1]
    stuck = HyperparameterConfig(clip_low=RLParameter(0.9, 0.9))
    assert explore(ALWAYS, INSIDE, stuck, np.random.default_rng(0)) == (
        INSIDE.replace(clip_coef=(0.9, 1.2)),
        {"clip_low": (pytest.approx(0.8), 0.9)},
    )


@pytest.mark.parametrize("factors", [{}, {"shrink_factor": 0.5, "grow_factor": 1.5}])
def test_twenty_mutations_do_not_drift(factors):
    config = HyperparameterConfig(lr=RLParameter(min=1e-12, max=1.0, **factors))
    rng = np.random.default_rng(0)
    logs = []
    for _ in range(1000):
        hparams = INSIDE.replace(lr=1e-6)
        for _ in range(20):
            hparams, _ = explore(ALWAYS, hparams, config, rng)
        logs.append(math.log(hparams.lr / 1e-6))
    # The mean of the logarithm is the exact statement, its spread here is below 0.02.
    assert abs(np.mean(logs)) < 0.1
    if not factors:
        assert math.exp(np.median(logs)) == pytest.approx(1.0, rel=0.1)


def test_a_group_size_of_four_can_become_five():
    config = HyperparameterConfig(group_size=RLParameter(min=2, max=16))
    start = INSIDE.replace(group_size=4)
    rng = np.random.default_rng(0)
    seen = {explore(ALWAYS, start, config, rng)[0].group_size for _ in range(50)}
    assert seen == {3, 5}


def test_a_beta_of_zero_can_leave_zero():
    config = HyperparameterConfig(beta=RLParameter(min=0.0, max=0.1))
    hparams, changes = explore(ALWAYS, INSIDE.replace(beta=0.0), config, np.random.default_rng(0))
    assert hparams.beta > 0
    assert changes == {"beta": (0.0, hparams.beta)}


def test_a_batch_size_of_all_rows_counts_as_the_greatest():
    config = HyperparameterConfig(batch_size=RLParameter(min=4, max=64))
    hparams, changes = explore(ALWAYS, INSIDE, config, np.random.default_rng(0))
    assert (hparams.batch_size, changes) == (51, {"batch_size": (64, 51)})


def test_every_parameter_has_the_same_chance():
    rng = np.random.default_rng(0)
    names = [next(iter(explore(ALWAYS, INSIDE, WIDE, rng)[1])) for _ in range(2400)]
    shares = {name: names.count(name) / len(names) for name in WIDE.names()}
    assert all(0.06 < share < 0.11 for share in shares.values()), shares


def test_the_two_weights_are_relative():
    rng = np.random.default_rng(0)
    mutations = Mutations(no_mutation=3, rl_hp=1)
    moved = sum(bool(explore(mutations, INSIDE, WIDE, rng)[1]) for _ in range(2000))
    assert 0.22 < moved / 2000 < 0.28
    never = Mutations(no_mutation=1, rl_hp=0)
    assert not any(explore(never, INSIDE, WIDE, rng)[1] for _ in range(100))


@pytest.mark.parametrize(
    "config", [HyperparameterConfig(), HyperparameterConfig(lr=RLParameter(1e-4, 1e-4))]
)
def test_nothing_to_move_changes_nothing(config):
    assert explore(ALWAYS, INSIDE, config, np.random.default_rng(0)) == (INSIDE, {})


def test_the_draws_of_a_seed_do_not_change():
    config = HyperparameterConfig(
        lr=RLParameter(1e-6, 1e-2), group_size=RLParameter(2, 16), clip_coef=RLParameter(0.05, 0.5)
    )
    start = INSIDE.replace(clip_coef=(0.8, 1.28), group_size=8)
    rng = np.random.default_rng(1)
    assert [explore(Mutations(), start, config, rng)[1] for _ in range(5)] == [
        {"clip_high": (1.28, 1.336)},
        {},
        {"clip_low": (0.8, 0.8400000000000001)},
        {"group_size": (8, 10)},
        {"group_size": (8, 10)},
    ]


def test_the_elite_draws_nothing_unless_it_may_mutate():
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    assert explore(ALWAYS, INSIDE, WIDE, rng, elite=True) == (INSIDE, {})
    assert rng.bit_generator.state == before
    everyone = Mutations(no_mutation=0, rl_hp=1, mutate_elite=True)
    assert explore(everyone, INSIDE, WIDE, rng, elite=True)[1]


def test_only_copies_mutate_where_that_is_asked_for():
    copies_only = Mutations(no_mutation=0, rl_hp=1, mutate_elite=True, copies_only=True)
    for elite in (False, True):
        rng = np.random.default_rng(0)
        assert explore(copies_only, INSIDE, WIDE, rng, elite=elite) == (INSIDE, {})
        assert rng.bit_generator.state == np.random.default_rng(0).bit_generator.state
    copy, alike = (
        explore(mutations, INSIDE, WIDE, np.random.default_rng(3), copied=True)
        for mutations in (copies_only, ALWAYS)
    )
    assert copy == alike
    assert copy[1]


def test_survivors_and_copies_mutate_alike():
    one, other = (
        explore(ALWAYS, INSIDE, WIDE, np.random.default_rng(3), copied=copied)
        for copied in (False, True)
    )
    assert one == other


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"no_mutation": -0.1}, r"^no_mutation: expected a number >= 0, got -0.1"),
        ({"rl_hp": math.nan}, r"^rl_hp: expected a finite number >= 0, got nan"),
        ({"no_mutation": 0, "rl_hp": 0}, r"^expected no_mutation or rl_hp above 0, got 0 for both"),
        ({"architecture": 0}, r"^architecture: unknown key"),
    ],
)
def test_values_out_of_range_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Mutations(**given)


CHOICES = HyperparameterConfig(
    lr=RLParameter(1e-6, 1e-2), group_size=RLParameter(choices=[4, 8, 16])
)


def test_choices_mutate_with_a_weight_of_their_own():
    moved = {"lr": 0, "group_size": 0, "": 0}
    mutations = Mutations(no_mutation=0.5, rl_hp=0.4, choice=0.1)
    for seed in range(2000):
        rng = np.random.default_rng(seed)
        new, changes = explore(mutations, INSIDE.replace(group_size=8), CHOICES, rng)
        assert new.group_size in (4, 8, 16)
        moved[next(iter(changes), "")] += 1
    assert moved["lr"] / 2000 == pytest.approx(0.4, abs=0.04)
    assert moved["group_size"] / 2000 == pytest.approx(0.1, abs=0.03)


def test_a_weight_for_choices_changes_nothing_where_none_are_searched():
    for seed in range(50):
        same = [
            explore(Mutations(choice=choice), INSIDE, WIDE, np.random.default_rng(seed))
            for choice in (0.0, 5.0)
        ]
        assert same[0] == same[1]


def test_a_weight_for_choices_alone_is_one():
    with pytest.raises(ConfigError, match="expected no_mutation or rl_hp above 0"):
        Mutations(no_mutation=0, rl_hp=0)
    with pytest.raises(ConfigError, match="expected no_mutation or rl_hp above 0"):
        Mutations(no_mutation=0, rl_hp=0, choice=0)
    only = Mutations(no_mutation=0, rl_hp=0, choice=1)
    for seed in range(20):
        _, changes = explore(
            only, INSIDE.replace(group_size=8), CHOICES, np.random.default_rng(seed)
        )
        assert list(changes) == ["group_size"]


def test_an_agent_without_a_name_moves_from_the_first_choice():
    config = HyperparameterConfig(prompt=RLParameter(choices=["a", "b", "c"]))
    mutations = Mutations(no_mutation=0, choice=1)
    moved = {
        explore(mutations, INSIDE, config, np.random.default_rng(seed))[1]["prompt"]
        for seed in range(30)
    }
    assert moved == {("a", "b"), ("a", "c")}
