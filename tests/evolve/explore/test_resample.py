"""Resampling: every value of a copy is drawn anew or moved by a factor."""

import numpy as np
import pytest
from explorer_contract import INSIDE, PROPERTY, RANGES
from hypothesis import given
from hypothesis import strategies as st

from evo_grpo.evolve.explore.resample import Resample
from evo_grpo.evolve.generation import changes_between
from evo_grpo.evolve.protocols import Candidate
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

WIDE = HyperparameterConfig(**RANGES)
seeds = st.integers(0, 2**32)


def explore(explorer, hparams, config, seed):
    return explorer.explore(Candidate(hparams, copied=True), config, np.random.default_rng(seed))


@PROPERTY
@given(seeds)
def test_without_drawing_every_value_moves_by_a_factor(seed):
    start = INSIDE.replace(group_size=8, beta=0.1, clip_coef=(0.8, 1.28))
    config = HyperparameterConfig(
        lr=RLParameter(1e-6, 1e-2),
        beta=RLParameter(0, 1, shrink_factor=0.5, grow_factor=2),
        group_size=RLParameter(2, 16),
        clip_coef=RLParameter(0.05, 0.5),
    )
    changes = changes_between(start, explore(Resample(probability=0), start, config, seed), config)
    ratios = {name: new / old for name, (old, new) in changes.items()}
    assert set(changes) == {"lr", "beta", "group_size", "clip_low", "clip_high"}
    assert ratios["lr"] == pytest.approx(0.8) or ratios["lr"] == pytest.approx(1.2)
    assert ratios["beta"] in (0.5, 2)
    assert changes["group_size"][1] in (6, 10)
    assert abs(changes["clip_low"][1] - 1) == pytest.approx(0.16) or changes["clip_low"][
        1
    ] == pytest.approx(0.76)


def test_values_drawn_anew_cover_the_range_by_the_logarithm():
    config = HyperparameterConfig(lr=RLParameter(1e-6, 1e-2, start=(1e-4, 1e-3)))
    drawn = [explore(Resample(probability=1), INSIDE, config, seed).lr for seed in range(400)]
    logs = np.log10(drawn)
    assert -6 <= logs.min() < -5.8
    assert -2.2 < logs.max() <= -2
    assert np.median(logs) == pytest.approx(-4, abs=0.3)


def test_the_probability_is_that_of_each_value():
    config = HyperparameterConfig(lr=RLParameter(1e-9, 1.0), temperature=RLParameter(1e-6, 10))
    moved = 0
    for seed in range(1000):
        changes = changes_between(INSIDE, explore(Resample(), INSIDE, config, seed), config)
        ratios = [new / old for old, new in changes.values()]
        moved += sum(min(abs(r - 0.8), abs(r - 1.2)) < 1e-9 for r in ratios)
    assert 0.71 < moved / 2000 < 0.79


@PROPERTY
@given(seeds, st.floats(0, 1))
def test_overlapping_ranges_of_a_clip_pair_keep_its_order(seed, probability):
    config = HyperparameterConfig(clip_low=RLParameter(0.5, 1.3), clip_high=RLParameter(0.9, 1.4))
    hparams = INSIDE.replace(clip_coef=(0.8, 1.28))
    for step in range(10):
        hparams = explore(Resample(probability=probability), hparams, config, seed + step)
        low, high = hparams.clip_bounds
        assert 0.5 <= low < high <= 1.4


def test_a_choice_is_drawn_anew_or_moves_to_the_next_one():
    config = HyperparameterConfig(group_size=RLParameter(choices=[2, 4, 8, 16]))
    start = INSIDE.replace(group_size=4)
    moved = {explore(Resample(probability=0), start, config, seed).group_size for seed in range(40)}
    assert moved == {2, 8}
    drawn = [
        explore(Resample(probability=1), start, config, seed).group_size for seed in range(400)
    ]
    assert all(drawn.count(size) > 60 for size in (2, 4, 8, 16))


def test_a_name_and_a_number_that_may_be_0_are_drawn_from_their_choices():
    config = HyperparameterConfig(
        prompt=RLParameter(choices=["a", "b", "c"]), top_k=RLParameter(choices=[0, 10, 50])
    )
    start = INSIDE.replace(prompt="a", top_k=10)
    drawn = [explore(Resample(probability=1), start, config, seed) for seed in range(60)]
    assert {one.prompt for one in drawn} == {"a", "b", "c"}
    assert {one.top_k for one in drawn} == {0, 10, 50}
    kept = [explore(Resample(probability=0), start, config, seed) for seed in range(20)]
    assert {one.prompt for one in kept} == {"a"}
