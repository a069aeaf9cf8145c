"""Readers that are killed at any touch of their cursor and of what they write lose nothing.

The run is finished; `follow` is killed at a touch of the disk or before a statement of SQL, killed
once more where it goes on, and lets the third end. A database then has each trial once, the page is
that of a reader that nobody kills, and a tracker has every step at least once, in one run.
"""

import importlib.util
import json
import random
import shutil
import time

import pytest
from small_run import small
from torture_table import shares, tried
from tracker_files import ended_wandb, read_tensorboard, read_wandb, steps_of_wandb

import evo_grpo

MOST = 120
"""Touches of a reader that are tried, evenly spread: a database has a thousand statements."""


def storage_of(folder):
    return f"sqlite:///{folder.with_name('studies.db')}"


def trials(folder):
    """Return the trials of the one study of the database."""
    import optuna

    (name,) = optuna.get_all_study_names(storage_of(folder))
    study = optuna.load_study(study_name=name, storage=storage_of(folder))
    return [
        (one.number, one.state.name, one.values, one.params, sorted(one.user_attrs.items()))
        for one in study.get_trials(deepcopy=False)
    ]


def page(folder):
    return (folder / "report.html").read_text(encoding="utf-8")


def measured(read):
    """Return what a tracker was given at each step, whether once or more often."""
    return lambda folder: {who: sorted(set(values)) for who, values in read(folder).items()}


def wandb(folder):
    """Return what wandb was given; its own process writes the last records after `finish`."""
    until = time.monotonic() + 30
    while time.monotonic() < until and not ended_wandb(folder):
        time.sleep(0.1)
    return measured(read_wandb)(folder)


READERS = {
    "optuna": trials,
    "report": page,
    "tensorboard": measured(read_tensorboard),
    "wandb": wandb,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    config = small(population__steps_per_round=2)
    return evo_grpo.run(config, out=tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture(scope="module", params=READERS)
def reader(request, runs, finished, tmp_path_factory):
    """The name of a reader, what it writes where nobody kills it, and its touches."""
    name = request.param
    if importlib.util.find_spec(name if name != "report" else "plotly") is None:
        pytest.skip(f"{name} is not installed; see make test-trackers")
    folder = tmp_path_factory.mktemp(name) / "run"
    shutil.copytree(finished, folder)
    _, touches = follow(runs, folder, name)
    assert touches > 10
    return name, READERS[name](folder), touches


def follow(runs, folder, name, at=None):
    storage = storage_of(folder) if name == "optuna" else None
    return runs.ask("follow", folder, {}, at=at, to=name, storage=storage)


def ids(folder, name):
    if name == "wandb":  # a kill between its start and its first entry leaves one without steps
        return {run for run, steps in steps_of_wandb(folder) if steps}
    cursor = json.loads((folder / "readers" / f"{name}.json").read_text())
    return {cursor["id"]}


def kill_at(runs, finished, folder, reader, touch, rng):
    """Kill at a touch, kill what goes on at another, and let the third end; returns the kills."""
    name, expected, touches = reader
    shutil.copytree(finished, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*.jsonl")}
    killed, _ = follow(runs, folder, name, at=touch)
    assert killed
    again, _ = follow(runs, folder, name, at=rng.randrange(1, touches))
    follow(runs, folder, name)
    assert READERS[name](folder) == expected
    assert name == "optuna" or len(ids(folder, name)) == 1
    assert before == {path: path.read_bytes() for path in before}
    shutil.rmtree(folder)
    folder.with_name("studies.db").unlink(missing_ok=True)
    return 1 + again


@shares(3, cases=1)
def test_a_kill_at_any_touch_loses_nothing(runs, finished, reader, tmp_path, part):
    rng = random.Random(1)
    touches = part(range(1, reader[2] + 1, -(-reader[2] // MOST)))
    kills = sum(kill_at(runs, finished, tmp_path / "run", reader, touch, rng) for touch in touches)
    tried("kill -9 of `follow` at a touch of the disk or the database, and again while it goes on",
          f"reader: {reader[0]}", kills)  # fmt: skip
