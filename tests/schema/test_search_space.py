"""Ranges in which hyperparameters mutate, their steps, and values outside of them."""

import math
import warnings

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from evo_grpo.errors import ConfigError
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import (
    HyperparameterConfig,
    RLParameter,
    ValueOutsideRange,
    outside,
    warn_if_nothing_mutates,
)

PROPERTY = settings(max_examples=60)
draws = st.floats(0, 1, exclude_max=True)
CLIP = HyperparameterConfig(clip_coef=RLParameter(min=0.1, max=0.25))


@pytest.mark.parametrize(
    ("hparams", "expected"),
    [
        (Hparams(clip_coef=0.2), []),
        (Hparams(clip_coef=0.3), [ValueOutsideRange("clip_coef", 0.3, CLIP["clip_coef"])]),
        (Hparams(clip_coef=(0.8, 1.2)), []),
        (Hparams(clip_coef=(0.75, 1.5)), [ValueOutsideRange("clip_coef", 0.5, CLIP["clip_coef"])]),
    ],
)
def test_what_lies_outside_of_its_range(hparams, expected):
    assert list(outside(hparams, CLIP)) == expected


def test_a_batch_of_all_rows_is_in_every_range():
    sizes = HyperparameterConfig(batch_size=RLParameter(min=2, max=8))
    assert not list(outside(Hparams(batch_size=None), sizes))
    assert list(outside(Hparams(batch_size=16), sizes))


def test_mutations_of_nothing_warn():
    with pytest.warns(UserWarning, match="no hyperparameters to mutate"):
        warn_if_nothing_mutates(0.8, HyperparameterConfig())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_nothing_mutates(0.0, HyperparameterConfig())
        warn_if_nothing_mutates(0.8, CLIP)


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
            {"nothing": RLParameter(0, 1)},
            r"nothing: nothing of that name can mutate\. .*: lr, beta",
        ),
        ({"learning_rate": {"min": 1e-6, "max": 3e-4}}, "Here it is lr"),
        ({"lr": [1e-6, 3e-4]}, r"lr: expected a range, got .*; write {min: 1e-6, max: 3e-4}"),
        ({"lr": (1e-5, 1e-3)}, r"lr: expected a range, .*got \(1e-05, 0.001\)"),
        ({"lr": 1e-4}, r"lr: expected a range, got 0.0001"),
        (
            {"clip_coef": RLParameter(0.1, 0.3), "clip_low": RLParameter(0.7, 0.9)},
            r"clip_coef: expected clip_coef alone, or clip_low and clip_high, got both",
        ),
        ({"group_size": RLParameter(2.5, 8)}, "group_size: expected integers for min and max, got"),
        (
            {"group_size": {"min": 2, "max": 16, "start": [4.5, 6]}},
            r"group_size.start: expected two integers, got \[4.5, 6",
        ),
        ({"lr": RLParameter(0, 1)}, "lr.min: expected a number > 0, got 0"),
        ({"top_p": RLParameter(0.5, 2)}, r"top_p.max: expected a number in \(0, 1\], got 2"),
        ({"clip_coef": RLParameter(0, 0.3)}, "clip_coef.min: expected > 0, got 0"),
        ({"group_size": {"choices": []}}, "choices: expected a list of names or of numbers"),
        ({"group_size": {"choices": [4, "8"]}}, "choices: expected names alone, or numbers alone"),
        ({"group_size": {"choices": [4, 8, 4]}}, "choices: expected each choice once, got"),
        ({"group_size": {"choices": [4, 8.5]}}, "choices: expected integers, .* group_size"),
        ({"group_size": {"choices": [1, 8]}}, "choices: expected an integer >= 2, got 1"),
        ({"group_size": {"choices": ["a"]}}, "choices: expected integers, .* group_size"),
        ({"lr": {"choices": [0.0, 0.1]}}, "choices: expected .* > 0, got 0"),
        (
            {"lr": {"choices": [1e-3], "min": 0.1}},
            "min: expected choices, or min and max, got both",
        ),
        ({"lr": {"choices": [1e-3], "start": [1, 2]}}, "start: expected none beside choices"),
        ({"clip_coef": {"choices": [0.1, 0.2]}}, "choices: expected min and max, since the two"),
    ],
)
def test_what_cannot_mutate_so_is_refused(parameters, message):
    with pytest.raises(ConfigError, match=message):
        HyperparameterConfig(**parameters)


def test_choices_keep_their_type_and_numbers_are_sorted():
    config = HyperparameterConfig(
        group_size=RLParameter(choices=[8, 4, 16]), lr={"choices": [1e-3, 1e-4]}
    )
    sizes = config["group_size"]
    assert (sizes.choices, sizes.dtype, sizes.min, sizes.max) == ((4, 8, 16), "int", 4, 16)
    assert config["lr"].choices == (1e-4, 1e-3)
    assert HyperparameterConfig(group_size=sizes.replace()) == HyperparameterConfig(
        group_size=RLParameter(choices=[4, 8, 16])
    )


def test_a_value_that_is_no_choice_is_outside():
    config = HyperparameterConfig(group_size={"choices": [4, 16]})
    assert [one.value for one in outside(Hparams(group_size=8), config)] == [8]
    assert not list(outside(Hparams(group_size=16), config))


def test_a_number_moves_to_the_next_choice():
    sizes = HyperparameterConfig(group_size={"choices": [4, 8, 16]})["group_size"]
    assert {sizes.step(8, draw) for draw in (0.0, 0.49, 0.5, 0.99)} == {4, 16}
    assert {sizes.step(4, draw) for draw in (0.0, 0.99)} == {8}
    assert sizes.clip(11) == 8


def test_choices_can_be_replaced_and_stand_alone_in_a_file():
    few = RLParameter(choices=[4, 8])
    assert few.replace(choices=[4, 8, 16]) == RLParameter(choices=[4, 8, 16])
    assert RLParameter(1, 2).replace(choices=[4, 8]) == few
    assert few.replace(min=1, max=2) == RLParameter(1, 2)
    dumped = few.model_dump(mode="json")
    assert not {"min", "max", "start"} & dumped.keys()
    assert RLParameter(**dumped) == few
    assert "choices" not in RLParameter(1, 2).model_dump()
