"""Hyperparameters: ranges, steps and names, with the message that each wrong value gets."""

import json
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from evo_grpo.errors import ConfigError
from evo_grpo.schema.hparams import MUTABLE, Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

PROPERTY = settings(max_examples=60)
draws = st.floats(0, 1, exclude_max=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 0.0}, r"lr: expected a number > 0, got 0.0"),
        ({"lr": math.nan}, r"lr: expected a finite number > 0, got nan"),
        ({"beta": -0.1}, r"beta: expected a number >= 0, got -0.1"),
        ({"group_size": 1}, r"group_size: expected an integer >= 2, got 1; a group of one"),
        ({"top_p": 1.1}, r"top_p: expected a number in \(0, 1\], got 1.1"),
        ({"top_k": -1}, r"top_k: expected an integer >= 0, got -1; 0 keeps"),
        ({"min_p": 1.0}, r"min_p: expected a number in \[0, 1\), got 1.0"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm: expected a number > 0, or null"),
        ({"batch_size": 0}, r"batch_size: expected an integer >= 1, or null, got 0"),
        ({"clip_coef": 0.0}, r"clip_coef: expected a number in \(0, 1\], or ratio bounds"),
        ({"clip_coef": 1.2}, r"clip_coef: .*got 1.2"),
        ({"clip_coef": (1.2, 0.8)}, r"0 <= low < high, .*got \(1.2, 0.8\)"),
        ({"clip_coef": (0.8,)}, r"clip_coef: expected a number .* got \(0.8,\)"),
        ({"clip_coef": None}, r"clip_coef: .*got null"),
        ({"clip_coef": (0, 10**400)}, r"0 <= low < high, .*got"),
        ({"lr": "1e-4"}, r"lr: expected a number > 0, got the string '1e-4'; write it without"),
        ({"top_k": None}, r"top_k: .*got null; 0 keeps all tokens"),
        ({"temperature": True}, r"temperature: expected a number > 0, got true"),
        ({"repetition_penalty": math.inf}, r"repetition_penalty: expected a finite .* got inf"),
        (
            {"lr": 1e-40},
            r"lr: expected a number from 1e-30 to 1e\+06, which float32 .* got 1e-40",
        ),
        ({"beta": 1e300}, r"beta: expected a number from 0 to 1e\+06, which float32"),
        (
            {"temperature": 1e-40},
            r"temperature: expected a number from 1e-06 to 1e\+06, .* 1e-40",
        ),
        ({"max_grad_norm": 1e-40}, r"max_grad_norm: expected a number >= 1e-12, which float32"),
        ({"learning_rate": 1.0}, r"learning_rate: unknown key; here it is lr"),
    ],
)
def test_a_value_out_of_range_is_named(values, message):
    with pytest.raises(ConfigError, match=message) as info:
        Hparams(**values)
    assert info.value.exit_code == 2


def test_a_weight_may_be_as_near_to_nothing_as_mutations_bring_it():
    """A range from 0 has no least step: what is next to nothing acts as nothing."""
    assert Hparams(beta=5e-324, weight_decay=5e-324).beta == 5e-324
    parameter = RLParameter(0.0, 0.1)
    value = 0.1
    for _ in range(4000):
        value = parameter.step(value, 0.999)
        Hparams(beta=value)
    assert value < 1e-38


def test_numbers_of_numpy_become_pythons_own():
    hparams = Hparams(lr=np.float32(0.5), group_size=np.int64(4), batch_size=np.int32(8))
    assert json.loads(json.dumps(hparams.to_dict()))["group_size"] == 4
    assert [type(v) for v in (hparams.lr, hparams.group_size, hparams.batch_size)] == [
        float,
        int,
        int,
    ]


def test_clip_bounds_of_a_scalar_and_of_a_pair():
    assert Hparams(clip_coef=0.25).clip_bounds == (0.75, 1.25)
    assert Hparams(clip_coef=(0.8, 1.28)).clip_bounds == (0.8, 1.28)
    assert Hparams(clip_coef=[0.8, 1.28]) == Hparams(clip_coef=(0.8, 1.28)), (
        "as YAML and JSON have it"
    )


@pytest.mark.parametrize("clip_coef", [0.2, (0.8, 1.28)])
def test_json_brings_back_the_same_value(clip_coef):
    hparams = Hparams(lr=3e-5, clip_coef=clip_coef, batch_size=None)
    assert Hparams(**json.loads(json.dumps(hparams.to_dict()))) == hparams


def test_no_limit_on_the_gradient_is_none_or_infinity():
    assert Hparams(max_grad_norm=math.inf) == Hparams(max_grad_norm=None)


@pytest.mark.parametrize("name", sorted(MUTABLE))
def test_every_mutable_name_can_be_read_and_set(name):
    own = {"loss_type": "cispo", "importance_sampling_level": "sequence", "adv_norm": "mean_only"}
    own |= {"kl_shaping": True}
    own |= {"clip_low": 0.7, "clip_high": 1.4, "clip_coef": 0.3, "group_size": 5, "prompt": "a"}
    own |= {"lora.target_modules": "mlp"}
    value = own.get(name)
    value = 3 if value is None and MUTABLE[name] is int else value or 0.6
    changed = Hparams().with_value(name, value)
    assert changed.get(name) == value
    assert changed != Hparams()


def test_one_end_of_a_clip_range_is_set_alone():
    assert Hparams(clip_coef=0.25).with_value("clip_high", 1.5).clip_coef == (0.75, 1.5)
    assert Hparams(clip_coef=(0.8, 1.28)).with_value("clip_low", 0.9).clip_coef == (0.9, 1.28)
    with pytest.raises(ConfigError, match="low < high"):
        Hparams(clip_coef=0.25).with_value("clip_low", 1.3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min": 2.0, "max": 1.0}, r"expected min <= max, got min 2 > max 1; swap"),
        ({"min": -1.0, "max": 1.0}, r"min: expected a number >= 0, got -1.0"),
        ({"min": 0.0, "max": math.inf}, r"max: expected a finite number >= 0, got inf"),
        ({"min": 0.0, "max": 1.0, "dtype": str}, r"dtype: expected 'float' or 'int', got <class"),
        ({"min": 0.0, "max": 1.0, "shrink_factor": 1.0}, r"shrink_factor: .* in \(0, 1\), got 1"),
        ({"min": 0.0, "max": 1.0, "grow_factor": 1.0}, r"grow_factor: expected a number > 1"),
        ({"min": 0.0}, r"max: missing; expected maximum"),
        (
            {"min": 0.1, "max": 1.0, "start": [0.05, 0.5]},
            r"start: .* part of the range \[0.1, 1\], got a start outside: \[0.05, 0.5\]",
        ),
        (
            {"min": 0.1, "max": 1.0, "start": [0.5, 0.2]},
            r"start: expected two numbers.*low <= high",
        ),
        ({"min": 0.1, "max": 1.0, "start": [0.2, math.nan]}, r"start: expected two numbers"),
    ],
)
def test_a_range_that_makes_no_sense_is_named(values, message):
    with pytest.raises(ConfigError, match=message):
        RLParameter(**values)


@PROPERTY
@given(
    st.floats(0, 10),
    st.floats(0, 10),
    st.floats(0, 10),
    draws,
    st.sampled_from([(0.8, 1.2), (0.5, 3)]),
)
def test_a_step_stays_in_range_and_moves(least, greatest, value, draw, factors):
    assume(least < greatest)
    parameter = RLParameter(least, greatest, shrink_factor=factors[0], grow_factor=factors[1])
    new = parameter.step(value, draw)
    assert least <= new <= greatest
    inside = least <= value <= greatest
    # Numbers too small to be multiplied (denormals) may stay where they are.
    assert new != value or not inside or value < 1e-300 or greatest - least < 1e-300


@PROPERTY
@given(st.integers(0, 40), st.integers(0, 40), st.integers(-5, 60), draws)
def test_a_step_of_an_int_is_an_int_and_moves(least, greatest, value, draw):
    assume(least < greatest)
    parameter = RLParameter(least, greatest, dtype=int)
    new = parameter.step(value, draw)
    assert isinstance(new, int)
    assert least <= new <= greatest
    assert new != value


def test_a_start_is_a_part_of_the_range():
    parameter = RLParameter(1e-5, 1e-2, "float", 0.5, 2.0, start=[1e-4, 1e-3])
    assert parameter.start == (1e-4, 1e-3)
    assert parameter.first == RLParameter(1e-4, 1e-3, "float", 0.5, 2.0)
    assert RLParameter(1e-5, 1e-2).first == RLParameter(1e-5, 1e-2)
    assert parameter.step(1e-4, 0.99) == 5e-5, "mutations leave it"


def test_a_start_of_an_integer_holds_integers():
    with pytest.raises(ConfigError, match=r"group_size.start: expected two integers, got \[4.5, 6"):
        HyperparameterConfig(group_size={"min": 2, "max": 16, "start": [4.5, 6]})
    config = HyperparameterConfig(group_size={"min": 2, "max": 16, "start": [4, 6]})
    assert config["group_size"].start == (4, 6)


@pytest.mark.parametrize(
    ("parameter", "value", "draw", "expected"),
    [
        (RLParameter(2, 16, dtype=int), 4, 0.0, 5),
        (RLParameter(2, 16, dtype=int), 4, 0.99, 3),
        (RLParameter(2, 16, dtype=int), 8, 0.0, 10),
        (RLParameter(0.0, 0.5), 0.0, 0.99, 0.005),  # a value of zero leaves zero
        (RLParameter(0, 50, dtype=int), 0, 0.99, 1),
        (RLParameter(0.1, 0.5), 0.0, 0.99, 0.1),  # from below the range into it
        (RLParameter(0.1, 0.5), 0.5, 0.0, 0.4),  # ends are left inwards
        (RLParameter(0.1, 0.5), 0.1, 0.99, 0.12),
        (RLParameter(0.3, 0.3), 0.3, 0.0, 0.3),
        (RLParameter(4, 4, dtype=int), 4, 0.99, 4),
    ],
)
def test_a_step(parameter, value, draw, expected):
    assert parameter.step(value, draw) == pytest.approx(expected)


@pytest.mark.parametrize("factors", [(0.8, 1.2), (0.5, 1.5), (0.9, 3.0)])
def test_the_expected_step_is_zero_in_the_logarithm(factors):
    parameter = RLParameter(1e-9, 1e9, shrink_factor=factors[0], grow_factor=factors[1])
    grow = parameter.grow_probability
    up = math.log(parameter.step(1.0, grow - 1e-9))
    down = math.log(parameter.step(1.0, grow))
    assert up > 0 > down
    assert grow * up + (1 - grow) * down == pytest.approx(0.0, abs=1e-12)


def test_a_config_knows_its_names_and_ints():
    config = HyperparameterConfig(group_size=RLParameter(2, 16), lr=RLParameter(1e-5, 1e-3))
    assert config.names() == ["group_size", "lr"]
    assert config["group_size"].dtype == "int", "whatever the range was given as"
    assert config["lr"].dtype == "float"
    assert config
    assert not HyperparameterConfig()
    same = HyperparameterConfig(
        group_size=RLParameter(2, 16, dtype=int), lr=RLParameter(1e-5, 1e-3)
    )
    assert config == same
    assert hash(config) == hash(same)
    assert config != HyperparameterConfig(lr=RLParameter(1e-5, 1e-3))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"learning_rate": RLParameter(0, 1)},
            r"learning_rate: nothing of that name can mutate\. .*: lr, beta",
        ),
        ({"lr": (1e-5, 1e-3)}, r"lr: expected a range, .*got \(1e-05, 0.001\)"),
        (
            {"clip_coef": RLParameter(0.1, 0.3), "clip_low": RLParameter(0.7, 0.9)},
            r"clip_coef: expected clip_coef alone, or clip_low and clip_high, got both",
        ),
        ({"group_size": RLParameter(2.5, 8)}, "group_size: expected integers for min and max, got"),
        ({"lr": RLParameter(0, 1)}, "lr.min: expected a number > 0, got 0"),
        ({"top_p": RLParameter(0.5, 2)}, r"top_p.max: expected a number in \(0, 1\], got 2"),
        ({"clip_coef": RLParameter(0, 0.3)}, "clip_coef.min: expected > 0, got 0"),
    ],
)
def test_what_cannot_mutate_is_refused(parameters, message):
    with pytest.raises(ConfigError, match=message):
        HyperparameterConfig(**parameters)
