"""Hyperparameters against the ranges in which they mutate."""

import warnings

import pytest

from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import (
    HyperparameterConfig,
    Outside,
    RLParameter,
    dead_clip,
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


@pytest.mark.parametrize(
    ("changes", "prompts", "dead"),
    [
        ({"update_epochs": 1}, 4, True),
        ({"update_epochs": 1, "batch_size": 32, "group_size": 8}, 4, True),
        ({"update_epochs": 1, "batch_size": 16, "group_size": 8}, 4, False),
        ({"batch_size": None, "update_epochs": 2}, 4, False),
    ],
)
def test_a_clip_that_mutates_without_acting(changes, prompts, dead):
    assert dead_clip(Hparams(**changes), CLIP, prompts) == ("clip_coef" if dead else None)
    more = HyperparameterConfig(update_epochs=RLParameter(min=1, max=2), **CLIP.parameters)
    assert dead_clip(Hparams(**changes), more, prompts) is None
    assert dead_clip(Hparams(**changes), HyperparameterConfig(), prompts) is None


def test_mutations_of_nothing_warn():
    with pytest.warns(UserWarning, match="no hyperparameters to mutate"):
        warn_if_nothing_mutates(0.8, HyperparameterConfig())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_nothing_mutates(0.0, HyperparameterConfig())
        warn_if_nothing_mutates(0.8, CLIP)
