"""The file that `evo-grpo recipe` writes, and the models that it refuses."""

import json
from dataclasses import replace

import pytest
import yaml
from shown_run import SUMMARY, run_folder, small_config, two_rounds
from small_run import small
from typer.testing import CliRunner

from evo_grpo import recipe, run
from evo_grpo import settings as configuration
from evo_grpo.cli.commands import app
from evo_grpo.errors import ConfigError, ModelError, RunDirError, RunNotFoundError
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.run_dir import RunDir
from evo_grpo.record.schedule import read_schedule
from evo_grpo.settings import DoubtfulSetting, to_yaml

SHAPE = {
    "model_type": "llama",
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 104,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def model_folder(path, **shape):
    """A model folder without weights: a recipe reads only its config.json."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SHAPE | shape))
    return str(path)


@pytest.fixture
def folder(tmp_path):
    return run_folder(tmp_path / "one")


def with_settings(folder, **changes):
    """Change settings in the population.yaml of a run."""
    file = folder / "population.yaml"
    found = yaml.safe_load(file.read_text())
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = found
        for name in parents:
            place = place[name]
        place[last] = value
    file.write_text(yaml.safe_dump(found))


def test_a_run_of_the_recipe_trains_with_the_schedule_of_the_winner(tmp_path):
    ran = run(small(), out=tmp_path / "run", progress=False)
    written = recipe(ran, tmp_path / "recipe.yaml")
    again = run(written, out=tmp_path / "again", progress=False)
    own = [one.hparams for one in read_schedule(ran).rounds]
    assert [record.agents[0].hparams for record in read_rounds(again)] == own
    assert all(len(record.agents) == 1 for record in read_rounds(again))


def test_the_file_begins_with_where_its_values_come_from(folder, tmp_path):
    written = recipe(folder, tmp_path / "recipe.yaml", rounds=6)
    comments, _, text = written.read_text().partition("\n\n")
    assert all(line.startswith("#") for line in comments.splitlines())
    assert f"the winner of {folder}: member 2 over tiny-sums" in comments
    assert "scored 0.807 on the test prompts, the base 0.331" in comments
    assert "lr 1e-3 there, as in the run" in comments
    found = yaml.safe_load(text)
    assert found["population"] == {"size": 1, "rounds": 6, "steps_per_round": 4}
    assert found["evolve"]["hyperparameters"] == {"lr": {"min": 0.001, "max": 0.0012}}
    entries = [{"round": 4, "lr": 0.0012}]
    assert found["evolve"]["exploration"] == {"kind": "schedule", "rounds": entries}
    assert "record" not in found  # defaults are left out
    again = configuration.load(written)
    assert configuration.from_dict(yaml.safe_load(configuration.to_yaml(again))) == again


def test_lr_follows_the_square_root_of_the_width(folder, tmp_path):
    wide = model_folder(tmp_path / "wide", hidden_size=384)
    written = recipe(folder, tmp_path / "recipe.yaml", model=wide)
    found = configuration.load(written)
    assert found.model.name == wide
    assert found.algorithm.lr == 5e-4  # 1e-3 * (96 / 384)^0.5
    assert found.evolve.exploration.rounds == [{"round": 2, "lr": 6e-4}]
    assert "times 0.5 = (96 / 384)^0.5, by the widths of tiny-sums" in written.read_text()


def test_lr_stays_where_a_width_is_unknown_and_the_user_is_told(folder, tmp_path):
    other = model_folder(tmp_path / "other", hidden_size=384, model_type="bert")
    with pytest.warns(DoubtfulSetting, match="the width of .*other is unknown.*'bert'"):
        written = recipe(folder, tmp_path / "recipe.yaml", model=other)
    assert configuration.load(written).algorithm.lr == 1e-3


def test_a_model_without_the_modules_of_the_run_is_refused_by_their_names(folder, tmp_path):
    # Known layers have the same names in all families that are known, so the run has others.
    narrow = model_folder(tmp_path / "narrow", hidden_size=48)
    with_settings(folder, model__name="gone", model__lora__target_modules=["q_proj", "c_attn"])
    with pytest.raises(ConfigError, match=r"c_attn, q_proj .*which lacks c_attn and has down_proj"):
        recipe(folder, tmp_path / "recipe.yaml", model=narrow)
    with_settings(folder, model__lora__target_modules=r".*layers\.7\..*q_proj")
    with pytest.raises(ConfigError, match=r"target_modules: .* matches no layer of .*narrow"):
        recipe(folder, tmp_path / "recipe.yaml", model=narrow)
    assert not (tmp_path / "recipe.yaml").exists()


def test_an_adapter_that_the_run_started_from_fits_no_other_model(folder, tmp_path):
    with_settings(folder, model__adapter="runs/sft")
    wide = model_folder(tmp_path / "wide", hidden_size=384)
    with pytest.raises(ConfigError, match=r"model\.adapter runs/sft, which fits only tiny-sums"):
        recipe(folder, tmp_path / "recipe.yaml", model=wide)


def test_groups_are_halved_until_they_fit_a_card(tmp_path):
    # A 7B model decodes a group of 8 completions of 1,024 tokens on 24 GB, and none of 16.
    large = model_folder(
        tmp_path / "large", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, head_dim=128, max_position_embeddings=32768,
    )  # fmt: skip
    settings = [
        "algorithm={lr: 1.0e-3, max_output_tokens: 1024, max_model_len: 1536}",
        "engine={gradient_checkpointing: true, max_decode_rows: 1024}",
    ]
    with RunDir.create(tmp_path / "one", "one", to_yaml(small_config(*settings))) as opened:
        for record in two_rounds():
            agents = [
                replace(
                    one,
                    hparams=one.hparams.replace(group_size=16),
                    metrics={**one.metrics, "rows": 4 * 16 * 3.0},
                )
                for one in record.agents
            ]
            opened.append_round(replace(record, agents=tuple(agents)))
        opened.write_summary(SUMMARY)
    written = recipe(tmp_path / "one", tmp_path / "recipe.yaml", model=large, gpu="24GB")
    algorithm = configuration.load(written).algorithm
    assert (algorithm.group_size, algorithm.prompts_per_step) == (8, 6)  # 3 prompts of 16 before
    assert "group_size  8 instead of 16, which does not fit into memory" in written.read_text()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"size": 0}, ConfigError, "size: expected"),
        ({"rounds": 0}, ConfigError, "rounds: expected"),
        ({"steps": 1.5}, ConfigError, "steps: expected"),
        ({"gpu": "h1000"}, ConfigError, "--gpu: expected a size"),
        ({"model": "./nowhere"}, ModelError, "nowhere"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(folder, tmp_path, given, error, message):
    with pytest.raises(error, match=message):
        recipe(folder, tmp_path / "recipe.yaml", **given)
    assert not (tmp_path / "recipe.yaml").exists()


def test_a_run_without_a_winner_or_a_schedule_is_refused(tmp_path):
    with pytest.raises(RunNotFoundError, match="no run folder"):
        recipe(tmp_path, tmp_path / "recipe.yaml")
    unfinished = run_folder(tmp_path / "unfinished", summary=False)
    with pytest.raises(RunDirError, match="expected a finished run"):
        recipe(unfinished, tmp_path / "recipe.yaml")


def test_a_file_that_exists_is_replaced_with_force_only(folder, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"already exists.*--force"):
        recipe(folder, file)
    with pytest.raises(ConfigError, match="expected the name of a file to write, got a folder"):
        recipe(folder, tmp_path, force=True)
    with pytest.raises(ConfigError, match="there is no folder"):
        recipe(folder, tmp_path / "none" / "recipe.yaml")
    assert file.read_text() == "mine"
    assert configuration.load(recipe(folder, file, force=True)).population.size == 1


def test_a_model_name_from_a_stranger_adds_no_line_to_the_file(folder, tmp_path):
    with_settings(folder, model__name="a/b\nengine: {device: mps}\n#")
    found = yaml.safe_load(recipe(folder, tmp_path / "recipe.yaml").read_text())
    assert "engine" not in found


def test_the_command_writes_a_population_around_the_winner(folder, tmp_path):
    file = tmp_path / "eight.yaml"
    given = ["recipe", str(folder), "-o", str(file), "--size", "8", "--rounds", "3", "--steps", "2"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert f"wrote {file}; next: evo-grpo check {file}" in result.stdout
    found = configuration.load(file)
    assert (found.population.size, found.population.rounds) == (8, 3)
    assert found.search_space()["lr"].min == pytest.approx(3.333e-4)
    # Temperature has one value on the line, and is searched around it.
    assert found.search_space().names() == ["lr", "temperature"]
