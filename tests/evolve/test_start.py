"""The first population: drawn within the ranges, by the logarithm, clip pairs in order."""

import math
import re

import numpy as np
import pytest
from explorer_contract import INSIDE, RANGES
from hypothesis import given, settings
from hypothesis import strategies as st

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.ranges import latin_hypercube
from evo_grpo.evolve.start import (
    described_start,
    sample_hparams,
    start_hparams,
    start_problems,
)
from evo_grpo.schema.hparams import MUTABLE, Hparams
from evo_grpo.schema.problems import line
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

PROPERTY = settings(max_examples=40)
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


@PROPERTY
@given(st.integers(1, 40), st.integers(1, 6), seeds)
def test_every_stratum_of_every_column_holds_one_point(rows, columns, seed):
    points = latin_hypercube(rows, columns, np.random.default_rng(seed))
    assert points.shape == (rows, columns)
    assert ((points > 0) & (points <= 1)).all()
    for column in points.T:
        assert sorted(np.ceil(column * rows - 1e-9)) == list(range(1, rows + 1))


def test_strata_are_permuted_for_each_column_by_itself():
    points = latin_hypercube(30, 2, np.random.default_rng(0))
    orders = np.argsort(points, axis=0)
    assert (orders[:, 0] != orders[:, 1]).any()
    assert abs(np.corrcoef(points.T)[0, 1]) < 0.5


def share_of(parameter, value):
    """Where a value lies in its range: in the logarithm, or from 0 in the value itself."""
    low, high = parameter.min, parameter.max
    if low > 0:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


@PROPERTY
@given(
    st.integers(2, 30),
    seeds,
    st.lists(st.sampled_from(["lr", "beta", "temperature", "top_p", "clip_coef"]), unique=True),
)
def test_the_others_lie_on_a_latin_hypercube_over_their_ranges(size, seed, names):
    config = HyperparameterConfig(**{name: RANGES[name] for name in names})
    agents = start_hparams(INSIDE, config, size, "latin_hypercube", seed)
    assert len(agents) == size
    assert agents[0] == INSIDE
    for name in names:
        shares = [share_of(config[name], agent.get(name)) for agent in agents[1:]]
        strata = sorted(math.ceil(share * (size - 1) - 1e-6) for share in shares)
        assert strata == list(range(1, size))


@PROPERTY
@given(st.integers(2, 30), seeds, st.booleans())
def test_both_ends_of_a_clip_pair_lie_on_it_too(size, seed, by_distance):
    config = (
        HyperparameterConfig(clip_coef=RLParameter(0.05, 0.5))
        if by_distance
        else HyperparameterConfig(clip_high=RLParameter(1.05, 1.5), clip_low=RLParameter(0.5, 0.95))
    )
    start = INSIDE.replace(clip_coef=(0.8, 1.28))
    agents = start_hparams(start, config, size, "latin_hypercube", seed)
    for name in ("clip_low", "clip_high"):
        distances = [abs(agent.get(name) - 1) for agent in agents[1:]]
        shares = [share_of(RLParameter(0.05, 0.5), distance) for distance in distances]
        assert sorted(math.ceil(s * (size - 1) - 1e-6) for s in shares) == list(range(1, size))


@PROPERTY
@given(st.integers(2, 20), seeds)
def test_overlapping_ranges_of_a_pair_keep_its_order(size, seed):
    config = HyperparameterConfig(clip_low=RLParameter(0.5, 1.3), clip_high=RLParameter(0.9, 1.4))
    start = INSIDE.replace(clip_coef=(0.8, 1.28))
    for agent in start_hparams(start, config, size, "latin_hypercube", seed):
        low, high = agent.clip_bounds
        assert 0.5 <= low < high <= 1.4


@PROPERTY
@given(seeds)
def test_integers_on_it_are_spread_too(seed):
    config = HyperparameterConfig(top_k=RLParameter(0, 9), group_size=RLParameter(2, 16))
    agents = start_hparams(INSIDE, config, 11, "latin_hypercube", seed)
    assert sorted(agent.top_k for agent in agents[1:]) == list(range(10))
    sizes = [agent.group_size for agent in agents[1:]]
    assert all(type(one) is int and 2 <= one <= 16 for one in sizes)
    assert sorted(sizes)[0] == 2
    assert sorted(sizes)[-1] > 12


@pytest.mark.parametrize("init", ["latin_hypercube", "sample"])
def test_the_first_population_is_drawn_from_start_where_a_range_has_one(init):
    config = HyperparameterConfig(
        lr=RLParameter(1e-6, 1e-2, start=(1e-4, 1e-3)),
        group_size=RLParameter(2, 16, start=(4, 6)),
        clip_coef=RLParameter(0.05, 0.5, start=(0.1, 0.2)),
    )
    for start in (INSIDE, INSIDE.replace(clip_coef=(0.8, 1.28))):
        for agent in start_hparams(start, config, 30, init, 0)[1:]:
            assert 1e-4 <= agent.lr <= 1e-3
            assert 4 <= agent.group_size <= 6
            low, high = agent.clip_bounds
            assert 0.1 - 1e-12 <= 1 - low <= 0.2 + 1e-12
            assert 0.1 - 1e-12 <= high - 1 <= 0.2 + 1e-12


def test_same_gives_all_the_same_and_without_ranges_all_names_do():
    assert start_hparams(INSIDE, WIDE, 3, "same", 0) == [INSIDE] * 3
    for init in ("latin_hypercube", "sample"):
        assert start_hparams(INSIDE, HyperparameterConfig(), 3, init, 0) == [INSIDE] * 3


@pytest.mark.parametrize("init", ["latin_hypercube", "sample"])
def test_a_seed_gives_the_same_start_again_and_another_seed_another(init):
    one, again, other = (start_hparams(INSIDE, WIDE, 6, init, seed) for seed in (3, 3, 4))
    assert one == again
    assert one != other


def test_a_list_gives_each_agent_its_own_values():
    config = HyperparameterConfig(lr=RLParameter(1e-5, 1e-2), clip_high=RLParameter(1.0, 1.5))
    given = [{}, {"lr": 1e-3, "group_size": 4}, {"clip_high": 1.3}, {"clip_coef": [0.8, 1.1]}]
    assert start_hparams(INSIDE, config, 4, given, 0) == [
        INSIDE,
        INSIDE.replace(lr=1e-3, group_size=4),
        INSIDE.replace(clip_coef=(0.8, 1.3)),
        INSIDE.replace(clip_coef=(0.8, 1.1)),
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{}], r"^expected one mapping for each of 2 agents, got 1; `{}` stands for an agent"),
        ([{}, {"lrr": 1}], r"^\[1\]\.lrr: unknown key; did you mean 'lr'\? Expected one of: lr,"),
        ([{}, {"lr": 0.0}], r"^\[1\]\.lr: expected a number > 0, got 0"),
        ([{"group_size": 1}, {}], r"^\[0\]\.group_size: .*>= 2, got 1; a group of one has no"),
        ([{}, {"lr": 0.5}], r"^\[1\]\.lr: .*inside of its range \[1e-05, 0.01\], got 0.5"),
        ([{}, {"clip_low": 1.3}], r"^\[1\]\.clip_low: .*low < high"),
        ([{}, {"clip_coef": 0.1, "clip_low": 0.9}], r"^\[1\]\.clip_coef: .*got both; remove one"),
    ],
)
def test_a_list_that_nobody_could_train_with_is_refused_with_its_path(given, message):
    config = HyperparameterConfig(lr=RLParameter(1e-5, 1e-2))
    (problem,) = start_problems(Hparams(), config, 2, given)
    assert re.search(message, line(problem))
    with pytest.raises(ConfigError, match=r"^init(\[\d\])?"):
        start_hparams(Hparams(), config, 2, given, 0)


@pytest.mark.parametrize(
    "init", ["same", "latin_hypercube", "sample", [{}, {"lr": 2e-3}, {"clip_coef": [0.7, 1.1]}]]
)
def test_a_start_is_described_by_the_setting_that_made_it(init):
    config = HyperparameterConfig(lr=RLParameter(1e-5, 1e-2))
    made = start_hparams(Hparams(), config, 3, init, 5)
    assert described_start(made, Hparams(), config, 5) == init


def test_a_start_outside_of_the_ranges_has_no_description_but_same():
    config = HyperparameterConfig(lr=RLParameter(1e-5, 1e-2))
    made = [Hparams(), Hparams(lr=0.5)]
    assert described_start(made, Hparams(), config, 0) == "same"


@pytest.mark.parametrize("size", [2, 5, 8])
@PROPERTY
@given(seeds)
def test_each_choice_has_its_share_of_the_agents_of_which_the_first_is_one(size, seed):
    config = HyperparameterConfig(
        lr=RLParameter(1e-6, 1e-2), group_size=RLParameter(choices=[4, 8, 16])
    )
    agents = start_hparams(INSIDE.replace(group_size=8), config, size, "latin_hypercube", seed)
    assert agents[0].group_size == 8
    counts = [sum(one.group_size == size for one in agents) for size in (4, 8, 16)]
    assert max(counts) - min(counts) <= 1
    assert len({one.lr for one in agents}) == size


def test_sampled_starts_take_any_choice():
    config = HyperparameterConfig(group_size=RLParameter(choices=[4, 8, 16]))
    agents = start_hparams(INSIDE.replace(group_size=8), config, 40, "sample", 0)
    assert {one.group_size for one in agents} == {4, 8, 16}
