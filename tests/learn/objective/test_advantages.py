import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from evo_grpo.errors import ConfigError, EvoGrpoError, RewardError, ShapeError
from evo_grpo.learn.objective.advantages import (
    group_advantages,
    zero_variance_fraction,
    zero_variance_groups,
)

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "golden" / "trl_grpo_1.16.0.json").read_text(encoding="utf-8")
)
REWARDS, WEIGHTS = GOLDEN["inputs"]["rewards_per_func"], GOLDEN["inputs"]["reward_weights"]
HOW = {
    "group": {},
    "batch": {"scale": "batch"},
    "none": {"scale": "none"},
}


def slow_advantages(rewards, sizes, *, scale="group", eps=1e-4, ddof=1):
    """One row at a time. None abstains."""

    def spread_of(values):
        if len(values) <= ddof or max(values) - min(values) <= 1e-8:
            return 0.0
        mean = statistics.fmean(values)
        return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - ddof))

    everything = [r for r in rewards if r is not None]
    result, start = [], 0
    for size in sizes:
        group = rewards[start : start + size]
        valid = [r for r in group if r is not None]
        for r in group:
            if r is None or max(valid) - min(valid) <= 1e-8:
                result.append(0.0)
            elif scale == "none":
                result.append(r - statistics.fmean(valid))
            else:
                spread = spread_of(valid if scale == "group" else everything)
                centred = r - statistics.fmean(valid)
                result.append(centred / (spread + eps) if spread > 0 else 0.0)
        start += size
    return result


@pytest.mark.parametrize("name", HOW)
def test_golden_case(name):
    want = GOLDEN["advantage_cases"][name]["adv"]
    ours = group_advantages(REWARDS, GOLDEN["inputs"]["G"], weights=WEIGHTS, **HOW[name])
    assert ours == pytest.approx(want, abs=1e-6)


def test_golden_fraction_of_groups_without_spread():
    want = GOLDEN["advantage_cases"]["group"]["is_std_zero_mean"]
    size = GOLDEN["inputs"]["G"]
    assert zero_variance_fraction(REWARDS, size, weights=WEIGHTS) == pytest.approx(want)
    dead = zero_variance_groups(REWARDS, size, weights=WEIGHTS)
    assert dead.tolist() == [False, True, False]


@st.composite
def groups(draw):
    equal = draw(st.booleans())
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    if equal:
        sizes = [sizes[0]] * len(sizes)
    reward = st.one_of(
        st.sampled_from([0.0, 1.0, 0.1]), st.integers(-40, 40).map(lambda i: i / 8 + 0.3)
    )
    if draw(st.booleans()):
        reward = st.one_of(reward, st.none())
    count = sum(sizes)
    return draw(st.lists(reward, min_size=count, max_size=count)), sizes


@settings(max_examples=80)
@given(
    groups(),
    st.sampled_from(["group", "batch", "none"]),
    st.sampled_from([0.0, 1e-4, 0.5]),
    st.sampled_from([0, 1, 2]),
)
def test_agrees_with_the_slow_advantages(batch, scale, eps, ddof):
    rewards, sizes = batch
    want = slow_advantages(rewards, sizes, scale=scale, eps=eps, ddof=ddof)
    how = {"scale": scale, "eps": eps, "ddof": ddof}
    assert group_advantages(rewards, sizes, **how) == pytest.approx(want, rel=1e-9, abs=1e-9)
    if len(set(sizes)) == 1:
        ours = group_advantages(rewards, sizes[0], **how)
        assert ours == pytest.approx(want, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("eps", [0.0, 1e-4])
@pytest.mark.parametrize("size", [3, [3, 3], [2, 4], 1, 6])
def test_a_group_without_spread_is_exactly_zero(size, eps):
    # The mean of three times 0.1 is not 0.1 in floating point.
    assert group_advantages([0.1] * 6, size, eps=eps) == [0.0] * 6


def equal_totals(rng, dtype=np.float64, offset=0.0, groups=3):
    """(P * G, K) rewards in tenths whose weighted sums are equal in each group, but for rounding.

    Integers w and r with w . r = constant: a row adds m w_j to r_i and takes m w_i from r_j.
    """
    functions, size = rng.integers(2, 6), int(rng.integers(2, 9))
    weights = rng.integers(1, 10, functions)
    rewards = np.repeat(rng.integers(-9, 10, (groups, functions)), size, axis=0)
    rows, many = np.arange(len(rewards)), rng.integers(-3, 4, len(rewards))
    i = rng.integers(functions, size=len(rows))
    j = (i + rng.integers(1, functions, len(rows))) % functions
    rewards[rows, i] += many * weights[j]
    rewards[rows, j] -= many * weights[i]
    return (rewards / 10 + offset).astype(dtype), (weights / 10).astype(dtype), size


def test_no_case_of_20000_gives_rounding_an_advantage():
    rng = np.random.default_rng(0)
    moved = unequal = 0
    for call in range(200):
        rewards, weights, size = equal_totals(rng, groups=100)
        if call % 5 == 0:
            rewards[rng.random(len(rewards)) < 0.3] = np.nan
        scale = ("group", "none", "batch")[call % 3]
        ours = group_advantages(rewards, size, weights=weights, scale=scale, ddof=call // 3 % 2)
        moved += int(ours.reshape(-1, size).any(axis=1).sum())
        totals = (rewards @ weights).reshape(-1, size)
        unequal += int((totals.max(axis=1) > totals.min(axis=1)).sum())
    assert moved == 0
    assert unequal > 8_000  # the cases do test something


KINDS = {"list": np.ndarray.tolist, "numpy": np.asarray, "torch": torch.from_numpy}


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.sampled_from([np.float64, np.float32]),
    st.sampled_from([0.0, 100.0, 1e6, -1e9]),
    st.booleans(),
    st.sampled_from(list(KINDS)),
    st.fixed_dictionaries(
        {
            "scale": st.sampled_from(["group", "none", "batch"]),
            "ddof": st.sampled_from([0, 1, 2]),
            "eps": st.sampled_from([0.0, 1e-4]),
        }
    ),
    st.booleans(),
)
def test_rounding_has_no_advantage(seed, dtype, offset, abstain, kind, how, ragged):
    rng = np.random.default_rng(seed)
    rewards, weights, size = equal_totals(rng, dtype, offset)
    if abstain:
        rewards[rng.random(len(rewards)) < 0.3] = np.nan
    sizes = [size] * (len(rewards) // size)
    if ragged:  # one more group, of another size
        rewards, sizes = np.concatenate([rewards, rewards[:1]]), [*sizes, 1]
    given_rewards, sizes = KINDS[kind](rewards), sizes if ragged else size
    # A list is fp64, whatever its numbers were rounded to before.
    assume(kind != "list" or dtype == np.float64)
    ours = group_advantages(given_rewards, sizes, weights=weights, **how)
    assert not np.asarray(ours).any()
    assert zero_variance_fraction(given_rewards, sizes, weights=weights) == 1.0


@settings(max_examples=60)
@given(
    groups(),
    st.sampled_from([np.float64, np.float32]),
    st.sampled_from([0.0, 1e3]),
    st.sampled_from([1.0, 1e-7, 1e-8, 1e-9]),
)
def test_the_metric_counts_the_groups_without_advantages(batch, dtype, offset, factor):
    rewards, sizes = batch
    values = (np.array(rewards, dtype=np.float64) * factor + offset).astype(dtype)
    for scale in ("group", "none", "batch"):
        ours = group_advantages(values, sizes, scale=scale, ddof=0)
        starts = np.cumsum(sizes) - sizes
        dead = np.maximum.reduceat(np.abs(ours), starts) == 0
        assert dead.tolist() == zero_variance_groups(values, sizes).tolist()


def test_unequal_rewards_keep_their_advantages_whatever_their_magnitude():
    for dtype, offset in ((np.float32, 1e6), (np.float64, 1e14)):
        rewards = (np.array([0.0, 1.0, 1.0, 0.0]) + offset).astype(dtype)
        assert group_advantages(rewards, 4, scale="none").tolist() == [-0.5, 0.5, 0.5, -0.5]
    small = group_advantages([0.0, 2e-8], 2, eps=0.0)
    assert small == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


def test_a_function_that_abstains_hides_no_rounding():
    rewards = [[0.1, 0.2, None], [0.3, None, 0.0]]
    for size in (2, [2]):
        assert group_advantages(rewards, size, scale="none") == [0.0, 0.0]


def test_abstentions_leave_the_baseline():
    rewards = [1.0, None, 0.0, None, None, 7.0]
    ours = group_advantages(rewards, 3, eps=0.0)
    assert ours == pytest.approx([math.sqrt(0.5), 0, -math.sqrt(0.5), 0, 0, 0])
    both = [[1.0, None], [None, None], [None, 0.0]]
    assert group_advantages(both, 3, scale="none") == [0.5, 0.0, -0.5]
    assert group_advantages([None] * 4, 2, scale="batch") == [0.0] * 4


def test_zero_variance_of_ragged_groups_and_of_abstentions():
    rewards = [1.0, 1.0, 0.0, 1.0, 0.5, None, 0.5, None, None, 0.1 + 0.2, 0.3]
    sizes = [2, 2, 3, 2, 2]
    assert zero_variance_groups(rewards, sizes).tolist() == [True, False, True, True, True]
    assert zero_variance_fraction(rewards, sizes) == 0.8
    assert zero_variance_fraction([], 4) == 0.0
    assert zero_variance_groups(torch.tensor([0.0, 1.0]), 2).tolist() == [False]


def test_the_kind_that_comes_in_goes_out():
    ours = group_advantages([0, 1], 2)
    assert type(ours) is list
    assert type(ours[0]) is float
    for dtype, want in [(np.float32, np.float32), (np.float16, np.float16), (int, np.float64)]:
        result = group_advantages(np.array([0, 1], dtype=dtype), 2)
        assert isinstance(result, np.ndarray)
        assert result.dtype == want
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        result = group_advantages(torch.tensor([0.0, 1.0], dtype=dtype), 2)
        assert isinstance(result, torch.Tensor)
        assert result.dtype == dtype
        assert result.float().tolist() == pytest.approx(ours, abs=4e-3)
    assert group_advantages(torch.tensor([0, 1]), 2).dtype == torch.float32
    assert not group_advantages(torch.tensor([0.0, 1.0], requires_grad=True), 2).requires_grad


def test_the_rewards_are_not_changed():
    for rewards in (np.arange(8.0), np.array([0.0, np.nan, 1.0, 2.0])):
        before = rewards.copy()
        group_advantages(rewards, 4)
        group_advantages(rewards[:, None], 2)
        assert np.array_equal(rewards, before, equal_nan=True)
    tensor = torch.arange(8.0)
    group_advantages(tensor, 4)
    assert torch.equal(tensor, torch.arange(8.0))


def test_large_offsets_keep_their_digits():
    base = np.array([0.0, 1.0, 2.0, 5.0])
    assert group_advantages(base + 1e9, 4) == pytest.approx(group_advantages(base, 4), abs=1e-6)


def test_nothing_gives_nothing():
    assert group_advantages([], 4) == []
    assert group_advantages([], []) == []
    assert group_advantages(np.zeros((0, 2)), 4).shape == (0,)


COLUMNS = [[1.0, 0.0], [0.0, 0.0]]
SIZES = "group_size: expected the completions of a prompt, an int >= 1 that divides the"


@pytest.mark.parametrize(
    ("arguments", "wrong", "kind", "message"),
    [
        (([1.0] * 5, 2), {}, ShapeError, f"{SIZES} 5 rows of rewards, .* got 2"),
        (([1.0] * 5, [2, 2]), {}, ShapeError, rf"{SIZES} 5 rows .* sum to them, got \[2, 2\]"),
        (([1.0] * 4, 0), {}, ShapeError, SIZES),
        (([1.0] * 4, [4, 0]), {}, ShapeError, SIZES),
        (([1.0] * 4, 2.0), {}, ShapeError, SIZES),
        (([1.0] * 4, True), {}, ShapeError, SIZES),
        (([[1.0], [1.0, 2.0]], 2), {}, ShapeError, "rewards: expected numbers, or None .*got"),
        ((["a", "b"], 2), {}, ShapeError, "rewards: expected numbers"),
        ((np.zeros((2, 2, 2)), 2), {}, ShapeError, r"rewards: expected shape \(B,\) or \(B, K\)"),
        ((1.0, 1), {}, ShapeError, r"rewards: expected shape .* got \(\);"),
        (([1.0, math.inf], 2), {}, RewardError, r"rewards\[1\]: expected a finite .* got inf;"),
        (([[1.0, -math.inf], [0, 0]], 2), {}, RewardError, r"rewards\[0, 1\]: .* got -inf;"),
        (([0.0, None, -1e308], [1, 2]), {}, RewardError, r"rewards\[2\]: .*1e\+15, .* -1e\+308;"),
        (([[0.0, 1e20], [0.0, 0.0]], 2), {}, RewardError, r"rewards\[0, 1\]: .* got 1e\+20; clip"),
        ((COLUMNS, 2), {"scale": "mean_std"}, ConfigError, "scale: .* batch, none, got 'mean_std'"),
        ((COLUMNS, 2), {"scale": None}, ConfigError, "scale: expected one of group, batch, none"),
        ((COLUMNS, 2), {"eps": -1.0}, ConfigError, "eps: expected a finite .* 1e-4, got -1.0"),
        ((COLUMNS, 2), {"ddof": 0.5}, ConfigError, "ddof: expected an int >= 0; .* got 0.5"),
        ((COLUMNS, 2), {"weights": [1.0]}, ShapeError, r"weights: .* got \[1.0\] .*\(2, 2\)"),
        ((COLUMNS, 2), {"weights": [1.0, math.nan]}, ShapeError, "weights: .* from -1e.15 to"),
        ((COLUMNS, 2), {"weights": [1.0, 1e300]}, ShapeError, "weights: .* from -1e.15 to"),
        (([1.0, 0.0], 2), {"weights": [1.0]}, ShapeError, r"weights: .*None with rewards \(B,\)"),
    ],
)
def test_wrong_arguments_say_what_was_expected(arguments, wrong, kind, message):
    functions = (group_advantages,) if wrong else (group_advantages, zero_variance_groups)
    for function in functions:
        with pytest.raises(kind, match=message) as caught:
            function(*arguments, **wrong)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, EvoGrpoError)


@pytest.mark.parametrize(
    ("kind", "dtype", "least", "sizes", "how"),
    [
        *((kind, np.float64, 1e20, 2, {}) for kind in KINDS),
        *((kind, np.float32, 1e20, 2, {}) for kind in ("numpy", "torch")),
        *(("torch", np.float64, least, 2, {}) for least in (3e38, 1e308)),
        *(("torch", np.float64, 1e20, 2, how) for how in HOW.values() if how),
        ("torch", np.float64, 1e20, [1, 1], {}),
    ],
)
def test_a_reward_that_no_float32_can_compute_with_is_refused(kind, dtype, least, sizes, how):
    rewards = KINDS[kind](np.array([[0.0, 0.0], [0.0, -least]], dtype=dtype))
    with pytest.raises(RewardError, match=r"^rewards\[1, 1\]: expected a finite number"):
        group_advantages(rewards, sizes, **how)
    with pytest.raises(RewardError, match=r"^rewards\[1, 1\]: expected a finite number"):
        zero_variance_groups(rewards, sizes)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("how", list(HOW.values()))
def test_the_largest_rewards_have_the_advantages_of_small_ones(dtype, how):
    """Nothing overflows up to the bound: against the same rewards divided by it."""
    small = np.array([1.0, -1.0, 0.5, 0.25, 0.0, 1.0])
    large = (small * 9.9e14).astype(dtype)
    got = group_advantages(large, 3, **how, eps=0.0)
    expected = group_advantages(small, 3, **how, eps=0.0)
    if how.get("scale") == "none":
        expected = expected * 9.9e14
    assert got == pytest.approx(expected, rel=1e-5)


def test_weights_that_make_a_reward_too_large_are_named():
    rewards = np.array([[1e10, 1.0], [0.0, 1.0]])
    message = r"rewards\[0\]: expected weighted rewards .* 1e\+15 .* function 0 of weight 1e\+10"
    for how in HOW.values():
        with pytest.raises(RewardError, match=message):
            group_advantages(rewards, 2, weights=[1e10, 1.0], **how)
    # What is too large in two functions does not cancel out.
    with pytest.raises(RewardError, match=r"rewards\[0\]: .*in sum, got 2e\+20"):
        group_advantages(np.full((2, 2), 1e10), 2, weights=[1e10, -1e10])


def test_an_advantage_that_half_precision_cannot_hold_is_refused():
    rewards = [6e4, 6e4, 6e4, -6e4]
    message = r"expected advantages of at most 65504, .* got 90000; give the rewards in float32"
    for given_rewards in (np.array(rewards, np.float16), torch.tensor(rewards).half()):
        with pytest.raises(RewardError, match=message):
            group_advantages(given_rewards, 4, scale="none")
        assert group_advantages(given_rewards, 4).dtype == given_rewards.dtype


def test_lists_and_arrays_need_no_torch():
    script = (
        "import sys, numpy as np\n"
        "from evo_grpo.learn.objective.advantages import group_advantages\n"
        "group_advantages([0.0, 1.0], 2); group_advantages(np.zeros(4), 2)\n"
        "assert 'torch' not in sys.modules\n"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root)
