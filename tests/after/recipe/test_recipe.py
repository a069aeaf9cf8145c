"""The file that `evo-grpo recipe` writes, and the models that it refuses."""

import pytest
import yaml
from shown_run import run_folder
from small_run import small
from typer.testing import CliRunner

from evo_grpo import recipe, run
from evo_grpo import settings as configuration
from evo_grpo.cli.commands import app
from evo_grpo.errors import ConfigError, RunDirError, RunNotFoundError
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.schedule import read_schedule


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
    assert "lr 1e-3 there" in comments
    found = yaml.safe_load(text)
    assert found["population"] == {"size": 1, "rounds": 6, "steps_per_round": 4}
    assert found["evolve"]["hyperparameters"] == {"lr": {"min": 0.001, "max": 0.0012}}
    entries = [{"round": 4, "lr": 0.0012}]
    assert found["evolve"]["exploration"] == {"kind": "schedule", "rounds": entries}
    assert "record" not in found  # defaults are left out
    again = configuration.load(written)
    assert configuration.from_dict(yaml.safe_load(configuration.to_yaml(again))) == again


def test_another_model_takes_the_values_as_they_are_and_no_code(folder, tmp_path):
    with_settings(folder, model__trust_remote_code=True, engine__max_decode_rows=64)
    found = configuration.load(recipe(folder, tmp_path / "recipe.yaml", model="org/wide"))
    assert (found.model.name, found.model.trust_remote_code) == ("org/wide", False)
    assert found.algorithm.lr == 1e-3
    assert found.evolve.exploration.rounds == [{"round": 2, "lr": 1.2e-3}]
    assert found.engine.max_decode_rows is None  # it fitted another model


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "size: expected"),
        ({"rounds": 0}, "rounds: expected"),
        ({"steps": 1.5}, "steps: expected"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(folder, tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
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
