"""Databases on the command line: what `check` and `run` say of one."""

import json
from pathlib import Path

import optuna
import pytest
from commands import evo
from small_run import SETTINGS, small

from evo_grpo import run, study_of

SERVER = "postgresql+psycopg://evo@127.0.0.1:1/evo"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run whose trials are in its journal."""
    return run(small(population__rounds=2), out=tmp_path_factory.mktemp("made") / "run")


def written(**record):
    Path("population.yaml").write_text(json.dumps({**SETTINGS, "record": record}))
    return "population.yaml"


@pytest.mark.parametrize(
    ("storage", "shown", "not_shown"),
    [
        (None, ["journal.log"], ["study.db", "readers"]),
        ("sqlite", ["study.db"], ["journal.log", "readers"]),
        (SERVER, [f"readers     optuna (study small-<id> in {SERVER})"],
         ["journal.log", "study.db"]),
    ],
)  # fmt: skip
def test_check_says_where_the_trials_will_be(storage, shown, not_shown):
    result = evo("check", written(storage=storage))
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert all(" ".join(one.split()) in text for one in shown)
    assert not any(one in text for one in not_shown)


def test_run_names_a_server_that_is_not_there_and_leaves_no_folder():
    result = evo("run", written(storage=SERVER), "--out", "out")
    assert result.exit_code == 2
    assert f"record.storage: {SERVER} cannot be used" in result.stderr
    assert "Connection refused" in result.stderr
    assert "Traceback" not in result.output
    assert not Path("out").exists()


@pytest.mark.slow
def test_a_run_ends_with_the_name_of_its_study(made):
    result = evo("run", written(storage="sqlite"), "--out", "out", "--set", "population.rounds=1")
    assert result.exit_code == 0, result.output
    name, where = study_of("out")
    assert f"Study: {name} in {where}" in " ".join(result.stdout.split())
    assert len(optuna.load_study(study_name=name, storage=where).trials) == 3
    finished = evo("resume", made)
    assert finished.exit_code == 0, finished.output
    assert "study:" not in finished.stdout  # a journal has none of its own name
