"""Hyperparameters: values and names, with the message that each wrong value gets."""

import json
import math

import numpy as np
import pytest

from evo_grpo.errors import ConfigError
from evo_grpo.schema.hparams import MUTABLE, Hparams
from evo_grpo.schema.search_space import RLParameter


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
