"""Hyperparameters against the ranges in which they mutate."""

import warnings

import pytest

from evo_grpo.errors import ConfigError
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import (
    HyperparameterConfig,
    Outside,
    RLParameter,
    outside,
    warn_if_nothing_mutates,
)

CLIP = HyperparameterConfig(clip_coef=RLParameter(min=0.1, max=0.25))


@pytest.mark.parametrize(
    ("hparams", "expected"),
    [
        (Hparams(clip_coef=0.2), []),
        (Hparams(clip_coef=0.3), [Outside("clip_coef", 0.3, CLIP["clip_coef"])]),
        (Hparams(clip_coef=(0.8, 1.2)), []),
        (Hparams(clip_coef=(0.75, 1.5)), [Outside("clip_coef", 0.5, CLIP["clip_coef"])]),
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


@pytest.mark.parametrize("given", [[1e-6, 3e-4], 1e-4, ["low", "high"]])
def test_a_range_that_is_no_mapping_says_how_to_write_one(given):
    with pytest.raises(
        ConfigError, match=r"expected a range, got .*; write {min: 1e-6, max: 3e-4}"
    ):
        HyperparameterConfig(lr=given)


def test_a_name_of_another_library_is_no_range():
    with pytest.raises(ConfigError, match="Here it is lr"):
        HyperparameterConfig(learning_rate={"min": 1e-6, "max": 3e-4})


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


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("group_size", {"choices": []}, "choices: expected a list of names or of numbers"),
        (
            "group_size",
            {"choices": [4, "8"]},
            "choices: expected names alone, numbers alone, or true and false",
        ),
        (
            "group_size",
            {"choices": [4, 8, 4]},
            "choices: expected each choice once, got",
        ),
        ("group_size", {"choices": [4, 8.5]}, "choices: expected integers, .* group_size"),
        ("group_size", {"choices": [1, 8]}, "choices: expected an integer >= 2, got 1"),
        ("group_size", {"choices": ["a"]}, "choices: expected integers, .* group_size"),
        ("lr", {"choices": [0.0, 0.1]}, "choices: expected .* > 0, got 0"),
        ("lr", {"choices": [1e-3], "min": 0.1}, "min: expected choices, or min and max, got both"),
        ("lr", {"choices": [1e-3], "start": [1, 2]}, "start: expected none beside choices"),
        ("clip_coef", {"choices": [0.1, 0.2]}, "choices: expected min and max, since the two ends"),
    ],
)
def test_choices_that_make_no_sense_are_named(name, given, message):
    with pytest.raises(ConfigError, match=message):
        HyperparameterConfig(**{name: given})


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
