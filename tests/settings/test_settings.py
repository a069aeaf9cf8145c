from pathlib import Path

import pytest
import yaml

from evo_grpo.errors import ConfigError
from evo_grpo.schema.hparams import MUTABLE, AgentFields, Hparams
from evo_grpo.schema.messages import OTHER_NAMES, leaves
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
from evo_grpo.settings import (
    AlgorithmConfig,
    EnvConfig,
    EvolveConfig,
    ModelConfig,
    RunConfig,
    from_dict,
    load,
    to_yaml,
    warnings,
)
from evo_grpo.settings.evolve import search_space
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
    assert config.model == ModelConfig(name="tiny-sums")
    assert config.env == EnvConfig(kind="sums")
    assert (config.name, config.seed) == ("population", 0)
    assert (config.population.size, config.population.rounds) == (8, 6)
    assert config.model.lora.target_modules == "all-linear"
    assert config.engine.device == config.engine.dtype == "auto"
    assert config.evolve.selection.kind == "tournament"
    assert config.evolve.fitness.test_prompts == 256


def test_removed_settings_that_were_off_are_left_out(tmp_path):
    off = {"recombine": "none", "svd_noise": 0.0}
    assert from_dict({**MINIMAL, "evolve": off}) == from_dict(MINIMAL)
    text = to_yaml(from_dict(MINIMAL)).replace(
        "\nevolve:\n", "\nevolve:\n  recombine: none\n  svd_noise: 0.0\n"
    )
    assert load(write(tmp_path, text)) == from_written(text, "a run") == from_dict(MINIMAL)
    assert off == {"recombine": "none", "svd_noise": 0.0}


def test_removed_settings_that_were_on_are_refused_beside_other_problems():
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


def test_a_plain_string_is_the_name_or_the_kind():
    long = from_dict({"model": {"name": "tiny-sums"}, "env": {"kind": "sums"}})
    assert long == from_dict(MINIMAL)


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


OTHER = {name: 0.3 if MUTABLE[name] is float else 3 for name in AgentFields.model_fields}


def test_hparams_carries_every_field():
    config = AlgorithmConfig(**OTHER)
    assert config.hparams().to_dict() == OTHER
    assert not set(Hparams().to_dict().items()) & set(OTHER.items())


def test_the_search_space_carries_ranges_factors_and_types():
    ranges = {
        "lr": {"min": 1e-5, "max": 1e-3, "grow_factor": 1.5},
        "group_size": {"min": 4, "max": 16},
    }
    expected = HyperparameterConfig(
        lr=RLParameter(1e-5, 1e-3, grow_factor=1.5), group_size=RLParameter(4, 16, dtype=int)
    )
    evolve = EvolveConfig(hyperparameters=ranges)
    assert search_space(evolve.hyperparameters, Hparams()) == expected
    assert not search_space({}, Hparams())


def test_lr_may_move_by_a_decade_where_nobody_says_what_may():
    space = from_dict(MINIMAL, ["algorithm.lr=1e-5"]).search_space()
    assert space.names() == ["lr"]
    assert (space["lr"].min, space["lr"].max) == pytest.approx((1e-6, 1e-4))
    assert not from_dict(MINIMAL, ["evolve.hyperparameters={}"]).search_space()


def test_the_agents_of_a_run_are_made_of_its_groups():
    config = from_dict(MINIMAL, ["seed=3", "algorithm.lr=1e-2", "engine.threads=1"])
    agents = config.agents()
    assert (agents.seed, agents.model, agents.algorithm) == (3, config.model, config.algorithm)
    assert (agents.engine, agents.hyperparameters) == (config.engine, None)


def test_it_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        from_dict(MINIMAL).seed = 3


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


@pytest.mark.parametrize("text", ["", "# nothing\n", "[1, 2]", "3", "text", "null"])
def test_a_root_that_is_no_mapping_is_refused(tmp_path: Path, text: str):
    path = write(tmp_path, text)
    with pytest.raises(
        ConfigError, match=r"population\.yaml: expected a mapping with the keys name"
    ):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [a", "line 1, column 10: expected YAML"),
        ("model: a\nmodel: b", "line 2, column 1: .*'model' occurs twice"),
        ("model: m\nenv: {kind: sums, args: {x: &a [*a]}}", "one contains itself"),
        ("model: !!python/object:os.system {}\nenv: sums", "expected YAML"),
        ("model: m\nenv: sums\n1: 2", r"expected strings as keys, got 1"),
        ("model: m\nenv: {kind: sums, 3: 4}", r"env\[3\]: expected a string as key"),
    ],
)
def test_broken_yaml_is_refused_with_its_place(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load(write(tmp_path, text))


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
    ("override", "message"),
    [
        (
            "evolve.selection.sise=3",
            "evolve.selection.sise: unknown key; did you mean 'size'? "
            "Expected one of: kind, size, elitism",
        ),
        ("populaton.size=3", "populaton: unknown key; did you mean 'population'?"),
        ("lr=3", "lr: unknown key; did you mean algorithm.lr?"),
        ("engine.qqq=3", "engine.qqq: unknown key; expected one of: device, dtype"),
        (
            "evolve.hyperparameters={lrr: {min: 1, max: 2}}",
            "evolve.hyperparameters.lrr: nothing of that name can mutate. Did you mean 'lr'?",
        ),
        (
            "evolve.hyperparameters={lr: {min: 1, maxx: 2}}",
            "evolve.hyperparameters.lr.maxx: unknown key; did you mean 'max'?",
        ),
        (
            "env={kind: sums, conversation: [{rol: user, content: x}]}",
            "env.conversation[0].rol: unknown key; did you mean 'role'?",
        ),
    ],
)
def test_unknown_keys_name_the_nearest_right_one(override: str, message: str):
    assert message in refused(override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "population.size=eight",
            "population.size: expected an integer >= 1, got the string 'eight'",
        ),
        (
            "population.size='8'",
            "got the string '8'; write it without quotes: 8",
        ),
        ("population.size=2.5", "population.size: expected an integer >= 1, got 2.5"),
        (
            "evolve.fitness.window=101",
            "evolve.fitness.window: expected an integer in [1, 100], got 101",
        ),
        ("population.size=null", "population.size: expected an integer >= 1, got null"),
        ("population=[1]", "population: expected a mapping, got a list ([1])"),
        ("algorithm.lr=.nan", "algorithm.lr: expected a finite number > 0, or null, got nan"),
        (
            "algorithm.kind=gpro",
            "algorithm.kind: expected 'grpo', 'gspo' or 'cispo', got the string 'gpro'; "
            "did you mean 'grpo'?",
        ),
        ("algorithm.clip_coef=true", "algorithm.clip_coef: expected a number in (0, 1], or"),
        (
            "model.lora.target_modules=[]",
            "model.lora.target_modules: expected a string, or a list of at least one string",
        ),
        ("env.reward=[f, 1]", "env.reward[1]: expected a function as a string, a mapping with"),
        (
            "engine.memory=24gb",
            "engine.memory: expected a number with its unit, MB, MiB",
        ),
        ("engine.device=gpu", "engine.device: expected auto, cpu, mps, cuda or cuda:N"),
        ("name=a/b", "name: expected letters, digits, dots, dashes and underscores"),
        ("env.args={d: 2026-01-01}", "a date has to be quoted"),
        ("env.args={low: .inf}", "env.args: expected finite numbers"),
        ("model.config={scale: [.nan]}", "model.config: expected finite numbers"),
        ("env.conversation=[]", "env.conversation: expected at least 1 entries, got a list"),
        ("record.optuna=1", "record.optuna: expected true or false, got 1"),
        ("model=null", "model.name: missing"),
    ],
)
def test_wrong_types_and_ranges(override: str, message: str):
    assert message in refused(override)


def test_missing_keys_say_what_is_expected():
    assert "model: missing; expected the base model: a name such as tiny-sums" in refused(
        settings={"env": "sums"}
    )
    assert "env: missing; expected the task: a kind such as sums" in refused(
        settings={"model": "tiny-sums"}
    )
    assert "lr.max: missing; expected maximum" in refused(
        "evolve.hyperparameters={lr: {min: 1e-4}}"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"": {None: 1}}, "['']"),
        ({"env": {"kind": "sums", "args": {"a": [{2.5: 1}]}}}, "env.args.a[0][2.5]: expected a s"),
        ({"env": {"kind": "sums", "conversation": [{0: 1}]}}, "env.conversation[0][0]: expected a"),
        ({"evolve": {"hyperparameters": {"lr": {0: 1}}}}, "evolve.hyperparameters.lr[0]: expected"),
        (
            {"evolve": {"hyperparameters": {None: 1}}},
            "evolve.hyperparameters[None]: expected",
        ),
    ],
)
def test_a_key_that_is_no_string_is_named_at_any_depth(settings: dict, message: str):
    assert message in refused(settings={**MINIMAL, **settings})


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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["population.size=1"],
            "population.size: expected at least 2 agents for selection tournament, got 1; raise "
            "it, or set evolve.selection.kind: none",
        ),
        (
            ["population.size=3", "evolve.selection.size=5"],
            "evolve.selection.size: expected at most population.size (3), got 5",
        ),
        (
            ["population.decisions=never"],
            'population.decisions: expected null, "every" or a list of rounds in ascending order '
            "such as [2, 4, 6], got the string",
        ),
        *(
            (
                [f"population.decisions={rounds}"],
                'population.decisions: expected null, "every" or a list of rounds in ascending',
            )
            for rounds in ("[]", "[0, 2]", "[4, 2]", "[2, 2]", "[1.5]", "[true]", "3", "all")
        ),
        (
            ["evolve.fitness.between=-1"],
            "evolve.fitness.between: expected an integer >= 0, or null, got -1",
        ),
        (
            ["population.size=3", "population.init=[{lr: 1e-3}]"],
            "population.init: expected one mapping for each of 3 agents, got 1",
        ),
        (
            ["population.size=2", "population.init=[{}, {lr: 1e-3, bta: 0.1}]"],
            "population.init[1].bta: unknown key; did you mean 'beta'?",
        ),
        (
            ["population.size=2", "population.init=[{}, {lr: 0.5}]"],
            "population.init[1].lr: expected a value inside of its range [0.0001, 0.01], got 0.5",
        ),
        (
            ["population.init=smaple"],
            "population.init: expected 'latin_hypercube', 'sample', 'same', a list with one "
            "mapping per agent, or {from: RUN} (did you mean 'sample'?), got the string 'smaple'",
        ),
        (
            ["algorithm.lr=1e-3", "evolve.hyperparameters={lr: {min: 1e-6, max: 1e-4}}"],
            "algorithm.lr: expected a value inside evolve.hyperparameters.lr [1e-06, 0.0001], "
            "got 0.001; move it, or widen the range",
        ),
        (
            ["evolve.hyperparameters={group_size: {min: 1, max: 8}}"],
            "evolve.hyperparameters.group_size.min: expected an integer >= 2, got 1; "
            "a group of one has no advantage",
        ),
        (
            [
                "algorithm.clip_coef=[0.8, 1.28]",
                "evolve.hyperparameters={clip_coef: {min: 0.1, max: 0.25}}",
            ],
            "algorithm.clip_coef: expected a value inside evolve.hyperparameters.clip_coef "
            "[0.1, 0.25], got 0.28",
        ),
        (
            ["evolve.exploration={no_mutation: 0, rl_hp: 0}"],
            "evolve.exploration: expected no_mutation or rl_hp above 0",
        ),
        (
            ["env=dataset", "env.reward=m:f"],
            "env.train: expected rows for kind dataset, got null; name a CSV, JSON, JSONL or",
        ),
        (
            ["env=dataset", "env.train=a.csv"],
            "env.reward: expected a reward function for kind dataset, got null; for instance",
        ),
        (
            ["env.prompt=x", "env.conversation=[{role: user, content: x}]"],
            "env.conversation: expected null beside prompt, got a list ([Message(role='user'",
        ),
        (
            ["env.reward=m:f", "env.reward_weights=[1, 2]"],
            "env.reward_weights: expected one weight per function of env.reward (1), got a list",
        ),
        (
            ["algorithm.max_output_tokens=4", "algorithm.min_output_tokens=5"],
            "algorithm.min_output_tokens: expected at most max_output_tokens (4), got 5",
        ),
        (
            ["algorithm.max_output_tokens=64", "algorithm.max_model_len=64"],
            "algorithm.max_output_tokens: expected less than max_model_len (64)",
        ),
        (
            ["population.sizes=[8, 9]"],
            "population.sizes: expected no number above the one before it, got [8, 9]",
        ),
        (
            ["population.sizes=[4, 2]"],
            "population.sizes: expected population.size (8) as the first number, got [4, 2]",
        ),
        (
            ["population.sizes=[8, 4, 1]", "evolve.archive=false"],
            "population.sizes: expected at least 2 agents in every round without evolve.archive",
        ),
        (["population.sizes=[8, 4, 0]"], "no more agents can leave than there are"),
        (["population.sizes=half"], 'population.sizes: expected null, "constant" or a list of'),
    ],
)
def test_contradictions(overrides: list[str], message: str):
    assert message in refused(*overrides)


def test_a_name_that_no_folder_can_have_is_refused():
    assert "name: expected a string of at most 200 characters" in refused(f"name={'n' * 255}")


def test_one_agent_needs_no_tournament():
    config = from_dict(MINIMAL, ["population.size=1", "evolve.selection.kind=none"])
    assert config.population.size == 1


def test_a_value_at_the_edge_of_its_range_is_inside():
    # 1 - 0.8 is 0.19999999999999996
    ranges = "evolve.hyperparameters={clip_coef: {min: 0.2, max: 0.3}}"
    config = from_dict(MINIMAL, ["algorithm.clip_coef=[0.8, 1.2]", ranges])
    assert config.algorithm.clip_coef == (0.8, 1.2)
    with pytest.raises(ConfigError, match=r"clip_coef: .*0\.2"):
        from_dict(MINIMAL, ["algorithm.clip_coef=[0.801, 1.2]", ranges])


# --- settings without effect ----------------------------------------------------------------------

CLIP = "evolve.hyperparameters={clip_coef: {min: 0.1, max: 0.3}}"


def test_the_shipped_file_has_no_warning():
    assert warnings(load(ROOT / "population.yaml")) == []


@pytest.mark.parametrize(
    ("overrides", "dead"),
    [
        # Of 8 agents 2 are left, which learn from their larger step in minibatches.
        (["algorithm.update_epochs=1"], False),
        (["algorithm.update_epochs=1", "population.sizes=constant"], True),
        # Of 8 agents 2 are left, which share the rows of all: 4 prompts, 8 completions, 8 / 2.
        (["algorithm.update_epochs=1", "algorithm.batch_size=128"], True),
        (["algorithm.update_epochs=1", "algorithm.batch_size=127"], False),
        (
            [
                *("algorithm.update_epochs=1", "algorithm.batch_size=32"),
                "population.sizes=constant",
            ],
            True,
        ),
        (["algorithm.update_epochs=2"], False),
        (
            [
                "algorithm.update_epochs=1",
                "evolve.hyperparameters.update_epochs={min: 1, max: 2}",
            ],
            False,
        ),
    ],
)
def test_a_clip_range_that_cannot_act_is_warned_of(overrides: list[str], dead: bool):
    found = warnings(from_dict(MINIMAL, [CLIP, *overrides]))
    assert any("clip_coef cannot act" in text for text in found) == dead


def test_group_sizes_that_break_constant_rows_are_warned_of():
    ranges = "evolve.hyperparameters={group_size: {min: 4, max: 64}}"
    (text,) = warnings(from_dict(MINIMAL, [ranges, "algorithm.prompts_per_step=4"]))
    # A share of 4 x 8 rows holds no group of 64: every agent would sample twice its share.
    assert "sample 2048 completions in a round instead of 1024" in text
    assert "lower its max to 32" in text
    narrow = ranges.replace("64", "16")
    assert warnings(from_dict(MINIMAL, [narrow])) == []


def test_other_settings_without_effect_are_warned_of():
    assert warnings(from_dict(MINIMAL)) == []
    (text,) = warnings(from_dict(MINIMAL, ["evolve.hyperparameters={}"]))
    assert "evolve.hyperparameters is empty" in text


@pytest.mark.parametrize(
    ("selection", "exploration", "warned"),
    [
        ("none", "{kind: mutate}", False),
        ("none", "{kind: mutate, copies_only: true}", True),
        ("none", "on_copy", True),
        ("none", "resample", True),
        ("none", "optuna", True),
        ("none", "none", False),
        ("halving", "on_copy", True),
        ("tournament", "on_copy", False),
        ("truncation", "on_copy", False),
    ],
)
def test_an_exploration_of_copies_where_nobody_is_copied_is_warned_of(
    selection: str, exploration: str, warned: bool
):
    given = [f"evolve.selection={selection}", f"evolve.exploration={exploration}"]
    found = warnings(from_dict(MINIMAL, given))
    assert any("changes only copies" in text for text in found) == warned


@pytest.mark.parametrize(
    ("init", "dead"),
    [("same", True), ("[{}, {lr: 2e-3}]", True), ("sample", False), ("latin_hypercube", False)],
)
def test_a_start_that_nothing_is_drawn_from_is_warned_of(init: str, dead: bool):
    ranges = "evolve.hyperparameters={lr: {min: 1e-4, max: 1e-2, start: [1e-3, 2e-3]}}"
    config = from_dict(MINIMAL, [ranges, "population.size=2", f"population.init={init}"])
    assert any("lr.start has no effect" in text for text in warnings(config)) == dead


def test_agents_with_values_of_their_own_need_no_ranges():
    given = ["evolve.hyperparameters={}", "population.size=2", "population.init=[{}, {lr: 5e-3}]"]
    assert warnings(from_dict(MINIMAL, given)) == []


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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "--set seed: expected a.b.c=value, for instance"),
        ("=3", "--set =3: expected a.b.c=value"),
        ("a..b=3", "--set a..b=3: expected a.b.c=value"),
        ("seed=[1", "--set seed=[1, line 1"),
        ("population=", "--set population=: expected a value after =; write population=null"),
        ("name= ", "--set name= : expected a value after ="),
        ("seed.x=1", "seed: expected an integer, got a mapping"),
    ],
)
def test_malformed_overrides(override: str, message: str):
    assert message in refused(override)


def test_an_override_below_a_plain_value_says_what_is_there():
    settings = {**MINIMAL, "algorithm": {"lr": 0.1}}
    message = refused("algorithm.lr.x=1", settings=settings)
    assert message == "--set algorithm.lr.x=1: expected a mapping at algorithm.lr, found 0.1"


# --- what ships ----------------------------------------------------------------------------------


def test_the_shipped_file_spells_out_what_newcomers_change():
    data = yaml.safe_load((ROOT / "population.yaml").read_text(encoding="utf-8"))
    assert {"size", "rounds", "steps_per_round"} <= set(data["population"])
    assert {"lr", "beta", "clip_coef", "group_size", "update_epochs"} <= set(data["algorithm"])
    assert {"kind", "size"} <= set(data["evolve"]["selection"])
    assert set(data["evolve"]["hyperparameters"]["lr"]) == {"min", "max"}
    assert {"device", "dtype"} <= set(data["engine"])
    assert data["model"]["name"] == "tiny-sums"
    assert data["env"] == {"kind": "sums"}


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"zero": 1}, r"engine\.zero: expected 2 or 3, got 1"),
        (
            {"zero": 3, "base": "sharded"},
            r"engine\.base: expected replicated with zero 3, .*sharded.*null",
        ),
        (
            {"zero": 2, "shards": 2},
            r"engine\.shards: expected null or 1 with zero 2, .*leave it out",
        ),
        (
            {"zero": 2, "overlap": True},
            r"engine\.overlap: expected false with zero 2, .*leave it out",
        ),
        (
            {"zero": 2, "dtype": "float16"},
            r"engine\.dtype: expected auto, bfloat16 or float32",
        ),
        ({"zero": 2, "compile": "default"}, r"engine\.compile: expected null with zero 2"),
    ],
)
def test_what_deepspeed_cannot_be_combined_with_is_refused(engine, message):
    with pytest.raises(ConfigError, match=message):
        from_dict({**MINIMAL, "engine": engine})


@pytest.mark.parametrize("how", ["base: sharded", "zero: 3"])
def test_a_quantised_base_that_is_divided_is_warned_of(how):
    text, *_ = warnings(
        from_dict(MINIMAL, [f"engine.{how}".replace(": ", "="), "engine.quantization=int8"])
    )
    assert text.startswith("engine.quantization: expected null on more than one process with")
    assert f"engine.{how}, which divides only floating-point weights, got int8" in text


# --- names of other libraries --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("learning_rate=1e-5", "here it is algorithm.lr."),
        ("algorithm.learning_rate=1e-5", "here it is lr."),
        ("algorithm.reward_funcs=a:b", "here it is env.reward."),
        ("env.reward_funcs=a:b", "here it is reward."),
        ("algorithm.num_generations=8", "here it is group_size."),
        ("algorithm.peft_config={}", "here it is model.lora."),
        ("model.peft_config={r: 4}", "here it is lora."),
        ("algorithm.per_device_train_batch_size=8", "here it is prompts_per_step."),
    ],
)
def test_names_of_other_libraries_are_refused_with_the_name_here(override: str, hint: str):
    assert f"unknown key; {hint}" in refused(override)


def test_the_names_here_exist():
    groups = {path for leaf in leaves(RunConfig) for path in (leaf, leaf[:1], leaf[:2])}
    assert {tuple(path.split(".")) for path in OTHER_NAMES.values()} <= groups
