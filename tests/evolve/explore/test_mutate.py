"""Mutation: values stay in range, do not drift, can leave 4 and 0, and one moves at a time.

Those by factors are tested first, then those to values between the tried ones.
"""

import math

import numpy as np
import pytest
from explorer_contract import INSIDE, PROPERTY, RANGES
from hypothesis import given
from hypothesis import strategies as st

from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.generation import changes_between
from evo_grpo.evolve.protocols import Candidate, Trial
from evo_grpo.schema.hparams import MUTABLE
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

ALWAYS = Mutations(step="factors")
WIDE = HyperparameterConfig(**RANGES)
seeds = st.integers(0, 2**32)


def explore(mutations, hparams, config, rng, **candidate):
    new = mutations.explore(Candidate(hparams, **candidate), config, rng)
    return new, changes_between(hparams, new, config)


def walk(hparams, config, seed, steps=60, mutations=ALWAYS):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        new, changes = explore(mutations, hparams, config, rng)
        yield hparams, new, changes
        hparams = new


@PROPERTY
@given(seeds)
def test_values_never_leave_their_range_and_one_moves_at_a_time(seed):
    for old, new, changes in walk(INSIDE, WIDE, seed, steps=20):
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


@pytest.mark.parametrize(
    ("name", "parameter", "start", "moved"),
    [
        ("group_size", RLParameter(min=2, max=16), 4, {3, 5}),
        ("beta", RLParameter(min=0.0, max=0.1), 0.0, {0.001}),  # it can leave 0
        ("batch_size", RLParameter(min=4, max=64), None, {51}),  # all rows count as the greatest
    ],
)
def test_small_numbers_and_those_at_an_end_can_move(name, parameter, start, moved):
    config, rng = HyperparameterConfig(**{name: parameter}), np.random.default_rng(0)
    hparams = INSIDE.with_value(name, start)
    found = {explore(ALWAYS, hparams, config, rng)[0].get(name) for _ in range(50)}
    assert found == moved


def test_every_parameter_has_the_same_chance():
    rng = np.random.default_rng(0)
    names = [next(iter(explore(ALWAYS, INSIDE, WIDE, rng)[1])) for _ in range(2400)]
    shares = {name: names.count(name) / len(names) for name in WIDE.names()}
    assert all(0.06 < share < 0.11 for share in shares.values()), shares


def test_the_two_weights_are_relative():
    rng = np.random.default_rng(0)
    mutations = Mutations(no_mutation=3, rl_hp=1, step="factors")
    moved = sum(bool(explore(mutations, INSIDE, WIDE, rng)[1]) for _ in range(2000))
    assert 0.22 < moved / 2000 < 0.28
    never = Mutations(no_mutation=1, rl_hp=0, step="factors")
    assert not any(explore(never, INSIDE, WIDE, rng)[1] for _ in range(100))


def test_the_draws_of_a_seed_do_not_change():
    config = HyperparameterConfig(
        lr=RLParameter(1e-6, 1e-2), group_size=RLParameter(2, 16), clip_coef=RLParameter(0.05, 0.5)
    )
    start = INSIDE.replace(clip_coef=(0.8, 1.28), group_size=8)
    rng = np.random.default_rng(1)
    mutations = Mutations(no_mutation=0.2, rl_hp=0.8, step="factors")
    assert [explore(mutations, start, config, rng)[1] for _ in range(5)] == [
        {"clip_high": (1.28, 1.336)},
        {},
        {"clip_low": (0.8, 0.8400000000000001)},
        {"group_size": (8, 10)},
        {"group_size": (8, 10)},
    ]


CHOICES = HyperparameterConfig(
    lr=RLParameter(1e-6, 1e-2), group_size=RLParameter(choices=[4, 8, 16])
)


def test_a_weight_for_choices_alone_is_one():
    only = Mutations(no_mutation=0, rl_hp=0, choice=1, step="factors")
    for seed in range(20):
        _, changes = explore(
            only, INSIDE.replace(group_size=8), CHOICES, np.random.default_rng(seed)
        )
        assert list(changes) == ["group_size"]


def test_an_agent_without_a_name_moves_from_the_first_choice():
    config = HyperparameterConfig(prompt=RLParameter(choices=["a", "b", "c"]))
    mutations = Mutations(no_mutation=0, choice=1, step="factors")
    moved = {
        explore(mutations, INSIDE, config, np.random.default_rng(seed))[1]["prompt"]
        for seed in range(30)
    }
    assert moved == {("a", "b"), ("a", "c")}


LR = HyperparameterConfig(lr=RLParameter(1e-6, 1e-2))


def between(hparams, config, tried, share, seed=0, mutations=None, **candidate):
    """Mutate a twin whose shares are all `share`, where agents have trained with `tried`."""
    trials = tuple(Trial(one, 0.5, 0) for one in tried)
    shares = (share,) * (len(config.names()) + 1)
    made = Candidate(hparams, **{"trials": trials, "twin": True, "shares": shares, **candidate})
    new = (mutations or Mutations()).explore(made, config, np.random.default_rng(seed))
    return new, changes_between(hparams, new, config)


@pytest.mark.parametrize("elite", [False, True])
@pytest.mark.parametrize("settings", [{}, {"mutate_elite": True}])
def test_only_twins_move_between_the_tried_values(settings, elite):
    rng = np.random.default_rng(0)
    alone = Candidate(INSIDE, elite=elite, trials=(Trial(INSIDE.replace(lr=1e-3), 0.5, 0),))
    assert Mutations(**settings).explore(alone, WIDE, rng) == INSIDE
    assert rng.bit_generator.state == np.random.default_rng(0).bit_generator.state
    assert between(INSIDE, LR, [INSIDE.replace(lr=1e-3)], 0.9)[1]


@pytest.mark.parametrize(
    ("tried", "low", "high"),
    [
        ((1e-5, 1e-3), 10**-4.5, 10**-3.5),  # the middles of both gaps
        ((1e-6, 1e-5, 1e-3, 1e-2), 10**-4.5, 10**-3.5),  # those next to it count, in any order
        ((1e-3, 1e-2, 1e-6, 1e-5), 10**-4.5, 10**-3.5),
        ((1e-5, 1e-4), 10**-4.5, 1e-2),  # nothing above it: up to the end of the range
        ((1e-4, 1e-3), 1e-6, 10**-3.5),
        ((1e-4 * (1 + 1e-9), 1e-5), 10**-4.5, 1e-2),  # rounding makes no other value
    ],
)
def test_values_lie_between_the_middles_of_the_gaps_to_the_next_tried_ones(tried, low, high):
    tried = [INSIDE.replace(lr=lr) for lr in tried]
    ends = [between(INSIDE, LR, tried, share)[0].lr for share in (1e-9, 0.5, 1.0)]
    assert ends == pytest.approx([low, math.sqrt(low * high), high], rel=1e-6)


def test_values_that_differ_in_another_hyperparameter_alone_leave_the_whole_range():
    tried = [INSIDE.replace(beta=0.1)]
    ends = [between(INSIDE, LR, tried, share)[0].lr for share in (1e-9, 1.0)]
    assert ends == pytest.approx([1e-6, 1e-2], rel=1e-6)


@PROPERTY
@given(seeds, st.lists(st.floats(-6, -2), min_size=1, max_size=6), st.floats(1e-6, 1))
def test_the_more_is_tried_the_less_values_move(seed, logs, share):
    tried = [INSIDE.replace(lr=10**log) for log in logs]
    more = [*tried, INSIDE.replace(lr=3e-4), INSIDE.replace(lr=2e-5)]
    low, high = (between(INSIDE, LR, tried, end, seed)[0].lr for end in (1e-12, 1.0))
    later = [between(INSIDE, LR, more, at, seed)[0].lr for at in (1e-12, share, 1.0)]
    assert later == sorted(later)
    assert 1e-6 <= low <= later[0] * (1 + 1e-9)
    assert later[-1] <= high * (1 + 1e-9) <= 1e-2 * (1 + 1e-9)
    # The gaps to 2e-5 and 3e-4 are the widest ones left.
    assert math.sqrt(1e-4 * 2e-5) <= later[0] * (1 + 1e-9)
    assert later[-1] <= math.sqrt(1e-4 * 3e-4) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "parameter", "here", "tried", "ends"),
    [
        ("beta", RLParameter(0.0, 0.2), 0.0, (0.1,), (0.0, 0.05)),
        ("beta", RLParameter(0.0, 0.2), 0.1, (0.0, 0.2), (0.05, 0.15)),
        ("top_k", RLParameter(0, 50), 10, (0, 20), (5, 15)),
        ("group_size", RLParameter(2, 32), 8, (4, 16), (6, 11)),
        ("adam_beta2", RLParameter(0.9, 0.9999), 0.999, (0.99,), (1 - 1e-4, 1 - 10**-2.5)),
    ],
)
def test_every_kind_of_range_moves_between_its_tried_values(name, parameter, here, tried, ends):
    config = HyperparameterConfig(**{name: parameter})
    start = INSIDE.with_value(name, here)
    others = [INSIDE.with_value(name, value) for value in tried]
    found = []
    for share in (1e-9, 0.3, 0.5, 0.8, 1.0):
        new, changes = between(start, config, others, share)
        value = new.get(name)
        assert isinstance(value, MUTABLE[name])
        assert changes == ({} if value == here else {name: (here, value)})
        found.append(value)
    assert (found[0], found[-1]) == pytest.approx(ends, abs=1e-6)
    assert found == sorted(found) or found == sorted(found, reverse=True)


def test_a_batch_size_of_all_rows_lies_at_the_end_of_its_range():
    config = HyperparameterConfig(batch_size=RLParameter(min=4, max=64))
    tried = [INSIDE.replace(batch_size=16)]
    _, changes = between(INSIDE, config, tried, 1e-9)
    assert changes == {"batch_size": (64, 32)}


def test_one_end_of_a_clip_pair_moves_by_its_distance_from_one():
    config = HyperparameterConfig(clip_coef=RLParameter(0.05, 0.5))
    start = INSIDE.replace(clip_coef=(0.8, 1.2))
    tried = [INSIDE.replace(clip_coef=(0.9, 1.1))]
    moved = {}
    for seed in range(20):
        ((name, (_, near)),) = between(start, config, tried, 1e-9, seed)[1].items()
        ((same, (_, far)),) = between(start, config, tried, 1.0, seed)[1].items()
        assert same == name
        moved[name] = (abs(near - 1), abs(far - 1))
    middle = math.sqrt(0.1 * 0.2)
    assert moved == {
        "clip_low": pytest.approx((middle, 0.5)),
        "clip_high": pytest.approx((middle, 0.5)),
    }


OVERLAPPING = HyperparameterConfig(clip_low=RLParameter(0.9, 1.2), clip_high=RLParameter(0.9, 1.2))


@pytest.mark.parametrize("alike", [False, True])
def test_ends_of_a_clip_range_do_not_pass_each_other(alike):
    for seed in range(50):
        rng = np.random.default_rng(seed)
        low, high = rng.uniform(0.9, 1.04), rng.uniform(1.06, 1.2)
        start = INSIDE.replace(clip_coef=(low, high))
        tried = [] if alike else [INSIDE.replace(clip_coef=(0.9, 1.05))]
        for share in (0.01, 0.5, 0.99):
            new, changes = between(start, OVERLAPPING, tried, share, seed)
            assert 0.9 <= new.clip_coef[0] < new.clip_coef[1] <= 1.2
            assert len(changes) == 1 or alike


def test_one_hyperparameter_moves_at_a_time_and_choices_with_their_own_weight():
    tried = [INSIDE.replace(lr=1e-3, group_size=8)]
    moved = {"lr": 0, "group_size": 0, "": 0}
    mutations = Mutations(no_mutation=0.3, rl_hp=0.5, choice=0.2)
    for seed in range(2000):
        start = INSIDE.replace(group_size=8)
        new, changes = between(start, CHOICES, tried, 0.9, seed, mutations)
        assert len(changes) <= 1
        assert "group_size" not in changes or new.group_size in (4, 16)
        moved[next(iter(changes), "")] += 1
    assert moved["lr"] / 2000 == pytest.approx(0.5, abs=0.04)
    assert moved["group_size"] / 2000 == pytest.approx(0.2, abs=0.03)


def test_where_all_began_alike_everything_moves_over_its_range():
    config = HyperparameterConfig(
        lr=RLParameter(1e-6, 1e-2),
        beta=RLParameter(0.0, 0.2),
        clip_coef=RLParameter(0.05, 0.5),
        group_size=RLParameter(choices=[4, 8, 16]),
    )
    start = INSIDE.replace(clip_coef=(0.8, 1.28), group_size=4)
    alike = (Trial(start, 0.5, 0),) * 4
    made = Candidate(start, twin=True, trials=alike, shares=(0.5, 0.5, 1.0, 0.5, 0.99))
    new = Mutations().explore(made, config, np.random.default_rng(0))
    changes = changes_between(start, new, config)
    middle = math.sqrt(0.05 * 0.5)
    assert (new.lr, new.beta) == pytest.approx((1e-4, 0.1))
    assert new.clip_coef == pytest.approx((0.5, 1 + middle))
    assert new.group_size == 16
    # lr was there already: only what changed is named.
    assert set(changes) - {"lr"} == {"beta", "clip_low", "clip_high", "group_size"}


@pytest.mark.parametrize(
    ("weights", "moved"),
    [
        ({"no_mutation": 1, "rl_hp": 0, "choice": 0}, set()),
        ({"rl_hp": 0, "choice": 1}, {"group_size"}),
        ({"choice": 0}, {"lr"}),
    ],
)
def test_what_has_no_weight_stays_where_all_began_alike(weights, moved):
    start = INSIDE.replace(group_size=4)
    _, changes = between(start, CHOICES, [start], 0.9, mutations=Mutations(**weights))
    assert set(changes) == moved
