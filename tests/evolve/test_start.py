"""The first population: drawn within the ranges, by the logarithm, clip pairs in order."""

import numpy as np
import pytest
from explorer_contract import INSIDE, RANGES
from hypothesis import given, settings
from hypothesis import strategies as st

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.start import sample_hparams
from evo_grpo.schema.hparams import MUTABLE
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)
WIDE = HyperparameterConfig(**RANGES)
seeds = st.integers(0, 2**32)


def test_the_draws_of_a_seed_do_not_change():
    config = HyperparameterConfig(
        lr=RLParameter(1e-6, 1e-2), group_size=RLParameter(2, 16), clip_coef=RLParameter(0.05, 0.5)
    )
    rng = np.random.default_rng(1)
    start = INSIDE.replace(clip_coef=(0.8, 1.28))
    drawn = sample_hparams(start, config, rng)
    assert (drawn.lr, drawn.group_size, drawn.clip_coef) == (
        8.968369668444848e-05,
        2,
        (0.6412347326784524, 1.0562756548295094),
    )


@PROPERTY
@given(seeds)
def test_the_first_population_is_drawn_within_the_ranges(seed):
    hparams = sample_hparams(INSIDE, WIDE, np.random.default_rng(seed))
    for name in WIDE.names():
        bounds = WIDE[name]
        assert bounds.min <= hparams.get(name) <= bounds.max
        assert isinstance(hparams.get(name), MUTABLE[name])


def test_what_does_not_mutate_keeps_its_value():
    config = HyperparameterConfig(beta=RLParameter(0.0, 0.1))
    hparams = sample_hparams(INSIDE, config, np.random.default_rng(0))
    assert hparams.replace(beta=INSIDE.beta) == INSIDE
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
    pair = INSIDE.replace(clip_coef=(0.8, 1.28))
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


def test_a_clip_range_below_the_other_bound_is_refused():
    config = HyperparameterConfig(clip_high=RLParameter(1.0, 1.2))
    start = INSIDE.replace(clip_coef=(1.3, 1.4))
    with pytest.raises(ConfigError, match=r"room for low < high, got clip_high in \[1.0, 1.2\]"):
        sample_hparams(start, config, np.random.default_rng(0))
