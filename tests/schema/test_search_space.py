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
        (Hparams(clip_coef=0.3), [Outside("clip_coef", 0.3, 0.1, 0.25)]),
        (Hparams(clip_coef=(0.8, 1.2)), []),
        (Hparams(clip_coef=(0.75, 1.5)), [Outside("clip_coef", 0.5, 0.1, 0.25)]),
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
    ("given", "remedy"),
    [
        ([1e-6, 3e-4], "{min: 1e-6, max: 3e-4}"),
        ((0.1, 0.3), "{min: 0.1, max: 0.3}"),
        ([4, 16], "{min: 4, max: 16}"),
        (1e-4, "{min: 1e-6, max: 3e-4}"),
        (["low", "high"], "{min: 1e-6, max: 3e-4}"),
    ],
)
def test_a_range_that_is_no_mapping_says_how_to_write_one(given, remedy):
    with pytest.raises(ConfigError, match="expected a range, a mapping with min and max") as error:
        HyperparameterConfig(lr=given)
    assert str(error.value).endswith(f"; write {remedy}")


def test_a_name_of_another_library_is_no_range():
    with pytest.raises(ConfigError, match="Here it is lr"):
        HyperparameterConfig(learning_rate={"min": 1e-6, "max": 3e-4})
