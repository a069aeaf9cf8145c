"""The default lr and its range follow the model; values that are far from usual are warned of."""

import pytest
import yaml

from evo_grpo import GRPO
from evo_grpo.schema.search_space import RLParameter
from evo_grpo.settings import AgentSettings, DoubtfulSetting, from_dict, to_yaml, warnings


def made(model, **groups):
    return from_dict({"model": model, "env": "sums", **groups})


def first_and_range(config):
    own = config.search_space()["lr"]
    return config.algorithm.lr, own.min, own.max


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("tiny-sums", (1e-3, 1e-4, 1e-2)),
        ("tiny-foods", (1e-3, 1e-4, 1e-2)),
        ("smollm2", (2e-5, 1e-6, 3e-4)),
        ("Qwen/Qwen3-4B", (2e-5, 1e-6, 3e-4)),
        ("./folder", (2e-5, 1e-6, 3e-4)),
    ],
)
def test_the_default_follows_the_model(model, expected):
    config = made(model)
    assert first_and_range(config) == expected
    assert first_and_range(made(model, algorithm={"lr": None})) == expected
    assert warnings(config) == []
    # The copy in the run folder has the values.
    assert yaml.safe_load(to_yaml(config))["algorithm"]["lr"] == expected[0]
    assert from_dict(yaml.safe_load(to_yaml(config))) == config


def test_python_has_the_same_default():
    assert AgentSettings(model="tiny-sums").algorithm.lr == 1e-3
    named, module = AgentSettings(model="owner/name"), AgentSettings()
    assert named.algorithm.lr == module.algorithm.lr == 2e-5
    assert named.search_space()["lr"] == RLParameter(1e-6, 3e-4, "float")


def test_a_given_lr_or_range_decides():
    """So does the lr that a run folder of an earlier version has recorded."""
    assert first_and_range(made("owner/name", algorithm={"lr": 1e-3})) == (1e-3, 1e-4, 1e-2)
    for model, lr in (("owner/name", 1e-4), ("tiny-sums", 1e-3)):
        ranges = {"hyperparameters": {"lr": {"min": 1e-4, "max": 1e-2}}}
        assert first_and_range(made(model, evolve=ranges)) == (lr, 1e-4, 1e-2)
    only_beta = made("owner/name", evolve={"hyperparameters": {"beta": {"min": 0, "max": 1}}})
    assert only_beta.algorithm.lr == 2e-5
    assert only_beta.search_space().names() == ["beta"]
    assert not made("owner/name", evolve={"hyperparameters": {}}).search_space()


@pytest.mark.parametrize(
    ("model", "overrides", "named"),
    [
        ("tiny-sums", ["algorithm.lr=1.0"], "algorithm.lr 1 is far"),
        ("owner/name", ["algorithm.lr=0.01"], "algorithm.lr 0.01 is far"),
        ("owner/name", ["algorithm.lr=1e-8"], "algorithm.lr 1e-8 is far"),
        (
            "owner/name",
            ["algorithm.lr=0.1", "evolve.hyperparameters={lr: {min: 1e-9, max: 1}}"],
            "algorithm.lr 0.1 is far",
        ),
        (
            "owner/name",
            ["population={size: 2, init: [{}, {lr: 0.5}]}", "evolve.hyperparameters={}"],
            "population.init[1].lr 0.5 is far",
        ),
    ],
)
def test_an_lr_far_from_usual_is_warned_of_once(model, overrides, named):
    config = from_dict({"model": model, "env": "sums"}, overrides)
    (text,) = [text for text in warnings(config) if "usual lr" in text]
    assert text.startswith(named)
    assert "1e-6 to 3e-4" in text or "1e-4 to 0.01" in text


def test_python_warns_too():
    with pytest.warns(DoubtfulSetting, match=r"algorithm\.lr 1 is far .* the embedded models"):
        GRPO(model="tiny-sums", lr=1.0)
