from pathlib import Path

import pytest
import yaml

from evo_grpo.errors import ConfigError
from evo_grpo.schema.messages import OTHER_NAMES, leaves
from evo_grpo.settings import (
    AlgorithmConfig,
    EnvConfig,
    ModelConfig,
    RunConfig,
    from_dict,
    load,
    to_yaml,
)
from evo_grpo.settings.yaml import from_written

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = {"model": "tiny-sums", "env": "sums"}


def refused(*overrides: str, settings: dict | None = None) -> str:
    """The message for settings that must not pass."""
    with pytest.raises(ConfigError) as caught:
        from_dict(settings or MINIMAL, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def write(folder: Path, text: str) -> Path:
    path = folder / "population.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# --- what passes ---------------------------------------------------------------------------------


def test_model_and_env_suffice_and_all_else_has_defaults():
    config = from_dict(MINIMAL)
    assert config == from_dict({"model": {"name": "tiny-sums"}, "env": {"kind": "sums"}})
    assert config.model == ModelConfig(name="tiny-sums")
    assert config.env == EnvConfig(kind="sums")
    assert (config.name, config.seed) == ("population", 0)
    assert (config.population.size, config.population.rounds) == (8, 6)
    assert config.model.lora.target_modules == "all-linear"
    assert config.engine.device == config.engine.dtype == "auto"
    assert config.evolve.selection.kind == "tournament"
    assert config.evolve.fitness.test_prompts == 256


def test_removed_settings_that_were_off_are_left_out(tmp_path):
    off, engine = {"recombine": "none", "svd_noise": 0.0}, {"compile": None}
    assert from_dict({**MINIMAL, "evolve": off, "engine": engine}) == from_dict(MINIMAL)
    text = to_yaml(from_dict(MINIMAL)).replace(
        "\nevolve:\n", "\nevolve:\n  recombine: none\n  svd_noise: 0.0\n"
    )
    assert load(write(tmp_path, text)) == from_written(text, "a run") == from_dict(MINIMAL)
    assert off == {"recombine": "none", "svd_noise": 0.0}


def test_removed_settings_that_were_on_are_refused_beside_other_problems():
    assert "engine.compile: expected null, got the string 'default'" in refused(
        "engine.compile=default"
    )
    text = refused("evolve.recombine=average")
    assert text == (
        "configuration with --set: evolve.recombine: expected none, got the string 'average': it "
        "was removed, since it helped nowhere; leave it out, or finish a run with the version that "
        "began it"
    )
    text = refused(settings={**MINIMAL, "evolve": {"svd_noise": 0.1, "archive": 3}})
    assert "2 problems" in text
    assert "evolve.svd_noise: expected 0, got 0.1: it was removed" in text
    assert "evolve.archive: " in text


def test_python_users_build_it_from_groups():
    config = RunConfig(
        model=ModelConfig(name="tiny-sums"),
        env=EnvConfig(kind="sums"),
        algorithm=AlgorithmConfig(clip_coef=(0.8, 1.28)),
    )
    assert config.algorithm.hparams().clip_bounds == (0.8, 1.28)
    with pytest.raises(ConfigError, match=r"population\.size: expected an integer >= 1, got 0"):
        RunConfig(model="tiny-sums", env="sums", population={"size": 0})


def test_an_empty_group_has_its_defaults(tmp_path: Path):
    text = "model: tiny-sums\nenv: sums\nalgorithm:\nevolve:\n  hyperparameters:\n  selection:\n"
    assert load(write(tmp_path, text)) == from_dict(MINIMAL)


# --- YAML ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        MINIMAL,
        {
            "name": "mine",
            "seed": -3,
            "model": {"name": "1e-4", "lora": {"alpha": 3, "target_modules": ["q_proj", "v_proj"]}},
            "env": {
                "kind": "dataset",
                "args": {"a": "1e5", "b": [1, 2.5, None, True], "c": {"d": "yes", "e": 1e-7}},
                "train": "a.csv",
                "prompt": "{q}\nä: ",
                "reward": ["m:f", "m:g"],
                "reward_weights": [1, 0.5],
            },
            "algorithm": {"lr": 1e-5, "clip_coef": [0.8, 1.28], "loss_type": "dapo"},
            "evolve": {
                "selection": {"kind": "none"},
                "hyperparameters": {"lr": {"min": 1e-7, "max": 1e-2}},
            },
        },
    ],
)
def test_the_resolved_file_loads_to_an_equal_configuration(tmp_path: Path, settings: dict):
    config = from_dict(settings)
    text = to_yaml(config)
    assert load(write(tmp_path, text)) == config
    assert list(yaml.safe_load(text)) == list(RunConfig.model_fields)


def test_numbers_may_be_written_with_an_exponent_and_no_dot(tmp_path: Path):
    text = "model: m\nenv: {kind: sums, args: {x: -2E3, y: '1e-4'}}\nalgorithm: {lr: 1e-4}\n"
    config = load(write(tmp_path, text))
    assert config.algorithm.lr == 1e-4
    assert config.env.args == {"x": -2000.0, "y": "1e-4"}


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such file; write one with: evo-grpo init"):
        load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="expected a YAML file, got a folder"):
        load(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00model")
    with pytest.raises(ConfigError, match="expected text in UTF-8"):
        load(tmp_path / "binary.yaml")


# --- wrong settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"": {None: 1}}, "['']"),
        ({"env": {"kind": "sums", "args": {"a": [{2.5: 1}]}}}, "env.args.a[0][2.5]: expected a s"),
        ({"env": {"kind": "sums", "conversation": [{0: 1}]}}, "env.conversation[0][0]: expected a"),
        ({"evolve": {"hyperparameters": {"lr": {0: 1}}}}, "evolve.hyperparameters.lr[0]: expected"),
        ({"evolve": {"hyperparameters": {None: 1}}}, "evolve.hyperparameters[None]: expected"),
        ({"model": None}, "model.name: missing"),
        ({"name": "n" * 255}, "name: expected a string of at most 200 characters"),
    ],
)
def test_wrong_keys_and_values_are_named_at_any_depth(settings: dict, message: str):
    assert message in refused(settings={**MINIMAL, **settings})
    assert "model: missing; expected the base model: a name" in refused(settings={"env": "sums"})


def test_all_problems_are_listed_at_once_one_line_each():
    message = refused("algorithm.lr=x", "population.sise=3", "evolve.selection.kind=turnament")
    head, *lines = message.split("\n")
    assert head == "configuration with --set: 3 problems"
    assert [line.split(":")[0].strip() for line in lines] == [
        "population.sise",
        "algorithm.lr",
        "evolve.selection.kind",
    ]


def test_a_start_of_each_agent_survives_the_file():
    given = ["population.size=2", "population.init=[{}, {lr: 2e-3, clip_coef: [0.8, 1.1]}]"]
    config = from_dict(MINIMAL, given)
    assert config.population.init == [{}, {"lr": 2e-3, "clip_coef": [0.8, 1.1]}]
    assert from_dict(yaml.safe_load(to_yaml(config))) == config


# --- settings that contradict each other ----------------------------------------------------------


def test_a_value_at_the_edge_of_its_range_is_inside():
    # 1 - 0.8 is 0.19999999999999996
    ranges = "evolve.hyperparameters={clip_coef: {min: 0.2, max: 0.3}}"
    config = from_dict(MINIMAL, ["algorithm.clip_coef=[0.8, 1.2]", ranges])
    assert config.algorithm.clip_coef == (0.8, 1.2)
    with pytest.raises(ConfigError, match=r"clip_coef: .*0\.2"):
        from_dict(MINIMAL, ["algorithm.clip_coef=[0.801, 1.2]", ranges])


# --- overrides -----------------------------------------------------------------------------------


def test_overrides_reach_through_shorthands_and_missing_groups():
    settings = {"model": "tiny-sums", "env": "sums", "evolve": None}
    config = from_dict(
        settings,
        ["model.lora.r=4", "env.args.low=3", "evolve.selection.size=3", "algorithm.lr=3e-4"],
    )
    assert (config.model.name, config.model.lora.r) == ("tiny-sums", 4)
    assert config.env == EnvConfig(kind="sums", args={"low": 3})
    assert config.evolve.selection.size == 3
    assert config.algorithm.lr == 3e-4
    assert settings == {"model": "tiny-sums", "env": "sums", "evolve": None}


def test_the_last_override_wins_and_values_are_yaml():
    config = from_dict(MINIMAL, ["seed=1", "seed=2", "algorithm.clip_coef=[0.8, 1.28]"])
    assert (config.seed, config.algorithm.clip_coef) == (2, (0.8, 1.28))


# --- names of other libraries --------------------------------------------------------------------


def test_the_names_here_exist():
    groups = {path for leaf in leaves(RunConfig) for path in (leaf, leaf[:1], leaf[:2])}
    assert {tuple(path.split(".")) for path in OTHER_NAMES.values()} <= groups
