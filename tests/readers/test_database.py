"""A database gets the trials of a run from its log: all of them, once, and no other run's."""

import json
import shutil
from dataclasses import asdict, replace
from types import SimpleNamespace

import optuna
import pytest
from fed_studies import SPACE, expected, reader_of, said, send
from random_runs import make_run, timed, with_scores
from small_run import SETTINGS, Told, small

from evo_grpo import resume, run, study_of
from evo_grpo.errors import RunDirError
from evo_grpo.record.database import DatabaseError, connect, disconnect
from evo_grpo.record.files import seal
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.log import RoundDone
from evo_grpo.record.run_dir import RunDir
from evo_grpo.settings import from_dict, to_yaml
from evo_grpo.training.recorded_inputs import inputs_of

#: Nothing listens on it.
GONE = "postgresql+psycopg://evo@127.0.0.1:1/evo"
CONFIG = from_dict({**SETTINGS, "evolve": {"hyperparameters": SPACE}})


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Optuna waits up to ten seconds in all before it gives a failed write up."""
    from optuna.storages._rdb import storage

    monkeypatch.setattr(storage, "time", SimpleNamespace(sleep=lambda seconds: None))


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A database with Optuna's tables and no study; to create the tables takes most of a second."""
    path = tmp_path_factory.mktemp("tables") / "empty.db"
    disconnect(connect(f"sqlite:///{path}"))
    return path


@pytest.fixture
def url(tmp_path, tables):
    return f"sqlite:///{shutil.copy(tables, tmp_path / 'shared.db')}"


@pytest.fixture
def records():
    return timed(make_run(size=3, rounds=4, failures=0.2))


def folder_of(path, records, id="id-1", storage=None):
    """A run folder with these rounds."""
    config = CONFIG.replace(record=CONFIG.record.replace(storage=storage))
    with RunDir.create(path, "small", to_yaml(config)) as opened:
        opened.write("inputs.json", seal(asdict(replace(inputs_of(config), id=id))))
        for record in records:
            opened.append_round(record)
    return path


def studies(url):
    """What the trials of all studies of a database say, by name."""
    return {
        name: list(map(said, optuna.load_study(study_name=name, storage=url).trials))
        for name in optuna.get_all_study_names(url)
    }


@pytest.mark.slow
def test_every_round_is_there_once_however_often_it_is_read(tmp_path, records):
    url = f"sqlite:///{tmp_path / 'new.db'}"  # whose tables are created too
    folder = folder_of(tmp_path / "run", records)
    for _ in range(3):
        send(folder, url)
        assert studies(url) == {"small-id-1": expected(records)}
    study = optuna.load_study(study_name="small-id-1", storage=url)
    assert study.user_attrs["run_id"] == "id-1"
    assert study.metric_names == ["fitness"]
    assert json.loads((folder / "readers/optuna.json").read_text())["id"] == "small-id-1"


@pytest.mark.slow
@pytest.mark.parametrize("trials", [0, 4, 6], ids=["at once", "in a round", "after a round"])
def test_one_that_is_killed_in_the_middle_adds_what_is_missing(
    tmp_path, url, records, trials, monkeypatch
):
    folder = folder_of(tmp_path / "run", records)
    add, added = optuna.Study.add_trial, []

    def killed(self, trial):
        if len(added) == trials:
            raise KeyboardInterrupt
        added.append(trial)
        add(self, trial)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.Study, "add_trial", killed)
        with pytest.raises(KeyboardInterrupt):
            send(folder, url)
    send(folder, url)
    assert studies(url) == {"small-id-1": expected(records)}


def test_a_copy_that_goes_on_as_the_run_does_adds_nothing(tmp_path, url, records):
    folder = folder_of(tmp_path / "run", records)
    copy = shutil.copytree(folder, tmp_path / "copy")
    readers = [reader_of(one, url) for one in (folder, copy)]
    for record in records:  # each in turn the first one
        for reader in readers[:: -1 if record.round % 2 else 1]:
            reader.read(RoundDone(record.round + 1, record))
    for reader in readers:
        reader.close()
    assert [reader.id for reader in readers] == ["small-id-1"] * 2
    assert studies(url) == {"small-id-1": expected(records)}


@pytest.mark.slow
@pytest.mark.parametrize("agents", [1, 3], ids=["half a round", "a round"])
def test_a_copy_that_went_on_differently_is_refused(tmp_path, url, records, agents):
    changed = with_scores(records[2], [0.125, 0.25, 0.5])
    others = [*records[:2], changed, *records[3:]]
    there = [*records[:2], replace(records[2], agents=records[2].agents[:agents])]
    send(folder_of(tmp_path / "run", there), url)
    copy = folder_of(tmp_path / "copy", others, storage=url)
    said = rf"study small-id-1.*of a copy of this run.*follow {copy} --to optuna --storage URL"
    with pytest.raises(RunDirError, match=said):
        send(copy, url)
    assert studies(url) == {"small-id-1": expected(there)}


def test_a_database_that_is_gone_is_named_in_its_own_words(tmp_path, records):
    folder = folder_of(tmp_path / "run", records)
    with pytest.raises(
        DatabaseError, match=r"127\.0\.0\.1.*port 1 failed: Connection refused"
    ) as e:
        send(folder, GONE)
    assert "\n" not in str(e.value)
    with pytest.raises(DatabaseError, match="unable to open database file"):
        send(folder, "sqlite:////no/such/folder/x.db")


def summary_of(last, **best):
    score = {"mean": 0.625, "se": None, "n": 8}
    parents = [agent.member for agent in last.agents[:2]]
    who = {"kind": "mean", "agent": None, "member": 99, "parents": parents, **best}
    mean = {**who, "kind": "mean", "agent": None, "tie": None}
    return {
        "split": "test",
        "base": score,
        "best": {**score, **who, "fitness": None, "checkpoint": "checkpoints/mean"},
        "gain": 0.0,
        "gain_se": 0.1,
        "rounds": last.round + 1,
        "wall_seconds": 1.0,
        "candidates": [{**mean, "validation": score}],
        "final_tokens": 3,
    }


@pytest.mark.slow
def test_the_mean_that_a_run_ended_with_is_added_once(tmp_path, url, records):
    folder = folder_of(tmp_path / "run", records)
    send(folder, url)
    (folder / "summary.json").write_text(json.dumps(summary_of(records[-1])))
    for _ in range(2):
        send(folder, url)
    (*rest, mean) = studies(url)["small-id-1"]
    assert rest == expected(records)
    parents = [agent.member for agent in records[-1].agents[:2]]
    assert mean[2] == [0.625]
    attributes = {name: mean[5][name] for name in ("op", "member", "round", "fitness_se")}
    assert attributes == {"op": "mean", "member": 99, "round": 4, "fitness_se": None}
    assert [mean[5]["parent"], mean[5]["second_parent"]] == parents


@pytest.mark.slow
def test_a_real_run_and_its_study(tmp_path, url):
    """From its settings to the trials, over a stop and more rounds than it began with."""
    with pytest.raises(KeyboardInterrupt):
        run(small(record__storage=url), out=tmp_path / "run", observer=Told(("learn", 2)))
    folder = tmp_path / "run"
    name, where = study_of(folder)
    assert where == url
    send(folder, url)
    resume(folder)
    send(folder, url)
    resume(folder, rounds=4)
    send(folder, url)
    assert not list(folder.glob("study.db*")) + list(folder.glob("journal.log*"))
    rounds = read_rounds(folder)
    assert studies(url) == {name: expected(rounds, small().search_space())}
    assert len(rounds) == 4
