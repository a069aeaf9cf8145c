"""Where the files and modules of a configuration are found: the working folder, and beside it."""

import sys
from pathlib import Path

import pytest
import yaml
from small_run import SETTINGS
from typer.testing import CliRunner

from evo_grpo import evaluate_adapter, resume, run, sample
from evo_grpo.cli.commands import app
from evo_grpo.envs.loading import load_function
from evo_grpo.errors import ConfigError
from evo_grpo.places import expanded, find, searching
from evo_grpo.record.folder import beside

REWARD = "def exact(completion, total):\n    return float(completion == total)\n"


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """A folder with a YAML file, its rows and its reward, below the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "jobs"
    folder.mkdir()
    rows = "".join(f"{n:02d}+01=,{n + 1:03d}\n" for n in range(30))
    (folder / "rows.csv").write_text("q,total\n" + rows)
    (folder / "beside_rewards.py").write_text(REWARD)
    env = {"kind": "dataset", "train": "rows.csv", "prompt": "{q}"}
    env["reward"] = "beside_rewards:exact"
    population = {"size": 2, "rounds": 1, "steps_per_round": 1}
    settings = {**SETTINGS, "env": env, "population": population}
    (folder / "population.yaml").write_text(yaml.safe_dump(settings))
    yield folder
    sys.modules.pop("beside_rewards", None)


def evo(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


@pytest.mark.slow
def test_files_and_modules_beside_a_file_are_found_and_a_run_knows_where_they_were(jobs):
    checked = evo("check", "jobs/population.yaml")
    assert checked.exit_code == 0, checked.output
    folder = run("jobs/population.yaml", out="run", progress=False)
    assert str(jobs) not in sys.path
    # A run folder names files as its YAML did, and is not told where to look by what it records.
    with pytest.raises(ConfigError) as caught:
        resume(folder, rounds=2)
    assert "the file of env.train is not there (the run was begun with" in str(caught.value)
    assert str(jobs / "beside_rewards.py") in str(caught.value)
    assert "name the folder that has it with --code" in str(caught.value)
    refused = evo("evaluate", "run")
    assert refused.exit_code == 2
    assert str(jobs / "rows.csv") in "".join(refused.output.split())
    resume(folder, rounds=2, code="jobs", progress=False)
    assert evaluate_adapter(folder, code=jobs, prompts=2).own.n == 2
    assert len(sample(folder, rows=[0], n=1, base=False, code=jobs)) == 1
    # The command that accepts a changed file repeats --code.
    (jobs / "beside_rewards.py").write_text(REWARD + "# changed\n")
    changed = evo("resume", "run", "--rounds", 3, "--code", "jobs")
    assert f"resumerun--code{jobs}--allow" in "".join(changed.output.split())


def test_nothing_is_looked_for_beside_the_copy_of_a_run_folder(jobs):
    run("jobs/population.yaml", out="run", progress=False)
    assert beside("jobs/population.yaml") == jobs
    assert beside("run/population.yaml") is None
    assert beside(Path("run/checkpoints/x.yaml")) is None
    assert beside({"model": "tiny-sums"}) is None
    with pytest.raises(ConfigError, match="expected a folder outside of any run folder"):
        resume("run", code="run")
    with pytest.raises(ConfigError, match="--code nowhere: expected a folder, got none"):
        resume("run", code="nowhere")


def test_the_working_folder_comes_first(jobs, tmp_path):
    (tmp_path / "rows.csv").write_text("q,total\n")
    with searching(jobs):
        assert find("rows.csv") == Path("rows.csv")
        (tmp_path / "rows.csv").unlink()
        assert find("rows.csv") == jobs / "rows.csv"
        assert find("nowhere.csv") == Path("nowhere.csv")
    assert find("rows.csv") == Path("rows.csv")


def test_a_module_of_another_folder_is_not_taken_for_one_of_the_same_name(jobs, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "beside_rewards.py").write_text("def exact(completion):\n    return 1.0\n")
    with searching(jobs):
        assert load_function("beside_rewards:exact")("1", total="1") == 1.0
    with (
        searching(other),
        pytest.raises(ConfigError, match="has imported another one of that"),
    ):
        load_function("beside_rewards:exact")


def test_a_home_that_is_not_known_becomes_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/run") == tmp_path / "run"
    with pytest.raises(ConfigError, match="~nobody-of-here/run: expected a path without ~, since"):
        run(SETTINGS, out="~nobody-of-here/run")
    assert not Path("~nobody-of-here").exists()
