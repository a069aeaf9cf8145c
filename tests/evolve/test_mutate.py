"""Mutation: values stay in range, do not drift, can leave 4 and 0, and one moves at a time."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.evolve.mutate import Mutations, sample_hparams
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

PROPERTY = settings(derandomize=True, deadline=None, max_examples=200)
ALWAYS = Mutations(no_mutation=0, rl_hp=1)
WIDE = HyperparameterConfig(
    lr=RLParameter(min=1e-6, max=1e-2),
    beta=RLParameter(min=0.0, max=0.2),
    clip_coef=RLParameter(min=0.05, max=0.5),
    group_size=RLParameter(min=2, max=16),
    temperature=RLParameter(min=0.5, max=1.5),
    top_p=RLParameter(min=0.5, max=1.0),
    top_k=RLParameter(min=0, max=50),
    min_p=RLParameter(min=0.0, max=0.3),
    repetition_penalty=RLParameter(min=0.8, max=1.3),
    max_grad_norm=RLParameter(min=0.05, max=2.0),
    update_epochs=RLParameter(min=1, max=4),
    batch_size=RLParameter(min=4, max=64),
)
INSIDE = Hparams(lr=1e-4, beta=0.0, clip_coef=0.2, top_p=0.9, batch_size=None)
seeds = st.integers(0, 2**32)


def walk(hparams, config, seed, steps=60, mutations=ALWAYS):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        new, changes = mutations.mutate(hparams, config, rng)
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
        assert isinstance(after, bounds.dtype)


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
    for _, new, changes in walk(replace(INSIDE, clip_coef=(0.8, 1.28)), config, seed):
        low, high = new.clip_coef
        assert low < high
        assert {"clip_low", "clip_high"} >= set(changes)
        assert 0.5 <= low <= (0.95 if by_distance else 1.1)
        assert (1.05 if by_distance else 0.9) <= high <= 1.5
        moved |= set(changes)
    assert moved == {"clip_low", "clip_high"}


def test_a_clip_end_moves_by_its_distance_from_one():
    config = HyperparameterConfig(clip_high=RLParameter(min=1.0001, max=1.01))
    start = replace(INSIDE, clip_coef=(0.9997, 1.0004))
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
    for _, new, _ in walk(replace(INSIDE, clip_coef=(0.9, 1.2)), config, 3, steps=200):
        assert new.clip_bounds[0] < new.clip_bounds[1]
    stuck = HyperparameterConfig(clip_low=RLParameter(0.9, 0.9))
    assert ALWAYS.mutate(INSIDE, stuck, np.random.default_rng(0)) == (
        replace(INSIDE, clip_coef=(0.9, 1.2)),
        {"clip_low": (pytest.approx(0.8), 0.9)},
    )


@pytest.mark.parametrize("factors", [{}, {"shrink_factor": 0.5, "grow_factor": 1.5}])
def test_twenty_mutations_do_not_drift(factors):
    config = HyperparameterConfig(lr=RLParameter(min=1e-12, max=1.0, **factors))
    rng = np.random.default_rng(0)
    logs = []
    for _ in range(2000):
        hparams = replace(INSIDE, lr=1e-6)
        for _ in range(20):
            hparams, _ = ALWAYS.mutate(hparams, config, rng)
        logs.append(math.log(hparams.lr / 1e-6))
    # The mean of the logarithm is the exact statement, its spread here is below 0.02.
    assert abs(np.mean(logs)) < 0.1
    if not factors:
        assert math.exp(np.median(logs)) == pytest.approx(1.0, rel=0.1)


def test_a_group_size_of_four_can_become_five():
    config = HyperparameterConfig(group_size=RLParameter(min=2, max=16))
    start = replace(INSIDE, group_size=4)
    rng = np.random.default_rng(0)
    seen = {ALWAYS.mutate(start, config, rng)[0].group_size for _ in range(50)}
    assert seen == {3, 5}


def test_a_beta_of_zero_can_leave_zero():
    config = HyperparameterConfig(beta=RLParameter(min=0.0, max=0.1))
    hparams, changes = ALWAYS.mutate(replace(INSIDE, beta=0.0), config, np.random.default_rng(0))
    assert hparams.beta > 0
    assert changes == {"beta": (0.0, hparams.beta)}


def test_a_batch_size_of_all_rows_counts_as_the_greatest():
    config = HyperparameterConfig(batch_size=RLParameter(min=4, max=64))
    hparams, changes = ALWAYS.mutate(INSIDE, config, np.random.default_rng(0))
    assert (hparams.batch_size, changes) == (51, {"batch_size": (64, 51)})


def test_every_parameter_has_the_same_chance():
    rng = np.random.default_rng(0)
    names = [next(iter(ALWAYS.mutate(INSIDE, WIDE, rng)[1])) for _ in range(2400)]
    shares = {name: names.count(name) / len(names) for name in WIDE.names()}
    assert all(0.06 < share < 0.11 for share in shares.values()), shares


def test_the_two_weights_are_relative():
    rng = np.random.default_rng(0)
    mutations = Mutations(no_mutation=3, rl_hp=1)
    moved = sum(bool(mutations.mutate(INSIDE, WIDE, rng)[1]) for _ in range(2000))
    assert 0.22 < moved / 2000 < 0.28
    never = Mutations(no_mutation=1, rl_hp=0)
    assert not any(never.mutate(INSIDE, WIDE, rng)[1] for _ in range(100))


@pytest.mark.parametrize(
    "config", [HyperparameterConfig(), HyperparameterConfig(lr=RLParameter(1e-4, 1e-4))]
)
def test_nothing_to_move_changes_nothing(config):
    assert ALWAYS.mutate(INSIDE, config, np.random.default_rng(0)) == (INSIDE, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"no_mutation": -0.1}, r"no_mutation must be a finite weight >= 0, got -0.1"),
        ({"rl_hp": math.nan}, r"rl_hp must be a finite weight >= 0, got nan"),
        ({"no_mutation": 0, "rl_hp": 0}, r"no_mutation and rl_hp are both 0"),
        ({"architecture": 0.2}, r"architecture must be 0, got 0.2: all agents share.*raise rl_hp"),
        ({"new_layer_prob": 0.2}, r"new_layer_prob must be 0"),
        ({"parameters": 0.2}, r"parameters must be 0"),
        ({"activation": 0.2}, r"activation must be 0"),
    ],
)
def test_values_out_of_range_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Mutations(**arguments)


def test_the_classic_call_is_accepted_and_an_accelerator_refused():
    classic = {
        "no_mutation": 0.1,
        "architecture": 0,
        "new_layer_prob": 0,
        "parameters": 0,
        "activation": 0,
        "rl_hp": 0.6,
        "mutation_sd": 0.1,
        "rand_seed": 42,
        "device": "cuda",
    }
    assert Mutations(**classic).rl_hp == 0.6
    with pytest.raises(EngineUnavailable, match="accelerator must be None, got object"):
        Mutations(accelerator=object())


class Agent:
    def __init__(self, hparams):
        self.hparams = hparams


class Population:
    """The least that a mutation needs."""

    def __init__(self, size, elite):
        self.agents = [Agent(INSIDE) for _ in range(size)]
        self.elite = elite
        self.hp_config = WIDE
        self.changes = {}

    def __len__(self):
        return len(self.agents)

    def __getitem__(self, slot):
        return self.agents[slot]

    def set_hparams(self, slot, hparams, changes):
        self.agents[slot].hparams = hparams
        self.changes[slot] = changes


@pytest.mark.parametrize(
    ("elite", "mutate_elite", "expected"),
    [(2, False, {0, 1, 3}), (2, True, {0, 1, 2, 3}), (None, False, {0, 1, 2, 3})],
)
def test_mutation_spares_the_elite(elite, mutate_elite, expected):
    population = Population(4, elite)
    mutations = Mutations(no_mutation=0, rl_hp=1, mutate_elite=mutate_elite, rand_seed=5)
    assert mutations.mutation(population) is population
    assert set(population.changes) == expected
    for slot, changes in population.changes.items():
        ((name, (_, after)),) = changes.items()
        assert population[slot].hparams.get(name) == after


def test_mutation_repeats_with_its_seed_and_draws_anew_at_every_call():
    def run(seed):
        mutations, population = Mutations(rand_seed=seed), Population(6, None)
        return [(mutations.mutation(population), dict(population.changes))[1] for _ in range(3)]

    assert run(1) == run(1)
    assert run(1) != run(2)
    first, second, _ = run(1)
    assert first != second


@PROPERTY
@given(seeds)
def test_the_first_population_is_drawn_within_the_ranges(seed):
    hparams = sample_hparams(INSIDE, WIDE, np.random.default_rng(seed))
    for name in WIDE.names():
        bounds = WIDE[name]
        assert bounds.min <= hparams.get(name) <= bounds.max
        assert isinstance(hparams.get(name), bounds.dtype)


def test_what_does_not_mutate_keeps_its_value():
    config = HyperparameterConfig(beta=RLParameter(0.0, 0.1))
    hparams = sample_hparams(INSIDE, config, np.random.default_rng(0))
    assert replace(hparams, beta=INSIDE.beta) == INSIDE
    assert sample_hparams(INSIDE, HyperparameterConfig(), np.random.default_rng(0)) == INSIDE


def test_draws_are_uniform_in_the_logarithm_or_in_the_value_from_zero():
    config = HyperparameterConfig(
        lr=RLParameter(1e-6, 1e-2),
        beta=RLParameter(0.0, 1.0),
        group_size=RLParameter(2, 4),
        top_k=RLParameter(0, 4),
    )
    rng = np.random.default_rng(0)
    drawn = [sample_hparams(INSIDE, config, rng) for _ in range(4000)]
    assert np.median([h.lr for h in drawn]) == pytest.approx(1e-4, rel=0.2)
    assert np.median([h.beta for h in drawn]) == pytest.approx(0.5, rel=0.1)
    groups = [h.group_size for h in drawn]
    # 2, 3 and 4 cover log(2.5/1.5), log(3.5/2.5) and log(4.5/3.5) of log(4.5/1.5).
    shares = [groups.count(size) / len(groups) for size in (2, 3, 4)]
    assert shares == pytest.approx([0.465, 0.306, 0.229], abs=0.03)
    tops = [h.top_k for h in drawn]
    assert all(abs(tops.count(k) / len(tops) - 0.2) < 0.03 for k in range(5))


@PROPERTY
@given(seeds)
def test_clip_pairs_are_drawn_in_order(seed):
    rng = np.random.default_rng(seed)
    pair = replace(INSIDE, clip_coef=(0.8, 1.28))
    by_distance = HyperparameterConfig(clip_coef=RLParameter(0.05, 0.5))
    low, high = sample_hparams(pair, by_distance, rng).clip_coef
    assert 0.5 <= low <= 0.95
    assert 1.05 <= high <= 1.5
    overlapping = HyperparameterConfig(
        clip_low=RLParameter(0.5, 1.3), clip_high=RLParameter(0.9, 1.4)
    )
    low, high = sample_hparams(pair, overlapping, rng).clip_coef
    assert low < high
    only_high = HyperparameterConfig(clip_high=RLParameter(1.0, 1.4))
    low, high = sample_hparams(pair, only_high, rng).clip_coef
    assert low == 0.8
    assert 1.0 < high <= 1.4


def test_clip_ranges_that_exclude_each_other_are_refused():
    config = HyperparameterConfig(clip_low=RLParameter(1.3, 1.4), clip_high=RLParameter(1.0, 1.2))
    with pytest.raises(ConfigError, match=r"room for low < high, got clip_low in \[1.3, 1.4\]"):
        sample_hparams(INSIDE, config, np.random.default_rng(0))
