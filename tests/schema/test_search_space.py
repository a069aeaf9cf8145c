"""Hyperparameters against the ranges in which they mutate."""

import warnings

import pytest

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
