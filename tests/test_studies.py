"""Where the trials of a run are kept: in its folder, or delivered to a database of several runs."""

import json
import shutil
import warnings
from dataclasses import asdict, replace

import optuna
import pytest
from small_run import Told, outcome, small

from evo_grpo import GRPO
from evo_grpo.baselines import compare
from evo_grpo.errors import ConfigError, EngineUnavailable, RunDirError, RunNotFoundError
from evo_grpo.inputs import read_inputs_of
from evo_grpo.record import delivery
from evo_grpo.record.database import open_file, open_url
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.run_dir import RunDir
from evo_grpo.settings import load
from evo_grpo.settings import storage as storages
from evo_grpo.studies import deliver, study_of
from evo_grpo.training import resume, run
from evo_grpo.verifying.verify import verify

#: Nothing listens on it.
GONE = "postgresql+psycopg://evo@127.0.0.1:1/evo"


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'shared.db'}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run that keeps its trials in the journal."""
    return run(small(), out=tmp_path_factory.mktemp("plain") / "run")


def whole(folder, url=None):
    """Whether the study of a run has each trial as recorded, and no other."""
    rounds, config = read_rounds(folder), load(folder / "population.yaml")
    id = read_inputs_of(folder).id
    name = f"{config.name}-{id}"
    opened = open_file(folder / "study.db", name, {}) if url is None else open_url(url, name, {})
    with opened as study:
        lineage = Lineage(study, hp_config=config.agents().search_space())
        count = len(lineage.trials())
        assert lineage.differing(rounds) == []
    return count == sum(len(record.agents) for record in rounds)


def same_but_for_the_study(one, other):
    """Whether two runs ended alike, whatever keeps their trials."""
    first, second = outcome(one), outcome(other)
    files = {"study.db", "journal.log"}
    first["files"], second["files"] = (set(o.pop("files")) - files for o in (first, second))
    return first == second


def stopped(config, folder, at=("learn", 2)):
    with pytest.raises(KeyboardInterrupt):
        run(config, out=folder, observer=Told(at))
    return folder


def changed(folder, **record):
    """Write other settings of `record` into a run's population.yaml."""
    from evo_grpo.settings import to_yaml

    config = load(folder / "population.yaml")
    config = config.replace(record=config.record.replace(**record))
    (folder / "population.yaml").write_text(to_yaml(config))


# --- in the folder -------------------------------------------------------------------------------


def test_a_run_with_sqlite_is_the_run_with_a_journal(plain, tmp_path):
    folder = run(small(record__storage="sqlite"), out=tmp_path / "run")
    assert same_but_for_the_study(plain, folder)
    assert whole(folder)
    assert not (folder / "journal.log").exists()
    found = verify(folder)
    assert found.damage == found.notes == []
    name, where = study_of(folder)
    loaded = optuna.load_study(study_name=name, storage=where)
    assert loaded.user_attrs["name"] == "small"
    assert loaded.user_attrs["run_id"] == read_inputs_of(folder).id
    assert loaded.user_attrs["base"] == "tiny-sums"
    assert loaded.user_attrs["objective"].startswith("fitness: mean reward on 6 validation")
    assert name == f"small-{loaded.user_attrs['run_id']}"
    assert study_of(plain) is None


def test_times_metrics_and_steps_are_those_of_the_rounds(tmp_path):
    folder = run(small(record__storage="sqlite", population__rounds=2), out=tmp_path / "run")
    rounds = read_rounds(folder)
    name, where = study_of(folder)
    for trial in optuna.load_study(study_name=name, storage=where).trials:
        record = rounds[trial.user_attrs["round"]]
        (agent,) = (a for a in record.agents if a.agent == trial.user_attrs["agent"])
        assert trial.datetime_start.timestamp() == pytest.approx(record.started, abs=1e-5)
        assert trial.datetime_complete.timestamp() == pytest.approx(record.ended, abs=1e-5)
        assert trial.user_attrs["train/reward"] == agent.metrics["reward"]
        assert trial.intermediate_values == {record.round: agent.step_rewards[0]}
    assert rounds[0].started < rounds[0].ended <= rounds[1].started


@pytest.mark.parametrize("left", ["whole", "no file", "half a write", "of another run"])
def test_a_stopped_run_goes_on_with_its_study(plain, tmp_path, left):
    folder = stopped(small(record__storage="sqlite"), tmp_path / "run")
    file = folder / "study.db"
    if left == "no file":
        file.unlink()
    elif left == "half a write":
        (folder / "study.db-journal").write_bytes(b"\0" * 100)
        assert verify(folder).damage == []
        (note,) = verify(folder).notes
        assert "a trial was being written to it; a resume writes it anew" in note
    elif left == "of another run":
        other = run(small(record__storage="sqlite", seed=9), out=tmp_path / "other")
        shutil.copy(other / "study.db", file)
    resume(folder)
    assert same_but_for_the_study(plain, folder)
    assert whole(folder)
    assert verify(folder).damage == verify(folder).notes == []


def test_a_finished_study_that_says_something_else_is_damage(tmp_path):
    import sqlite3

    folder = run(small(record__storage="sqlite", population__rounds=1), out=tmp_path / "run")
    with sqlite3.connect(folder / "study.db") as connection:
        connection.execute("UPDATE trial_values SET value = value + 1 WHERE trial_id = 2")
    connection.close()
    (text,) = verify(folder).damage
    assert "study.db: 1 of its trials are missing or not as recorded" in text
    (folder / "study.db").write_bytes(b"nothing of a database" * 300)
    (text,) = verify(folder).damage
    assert text.startswith(f"{folder / 'study.db'}: ")
    (folder / "study.db").unlink()
    assert "study.db" in verify(folder).damage[0]


def test_more_rounds_begin_a_study_in_the_folder_anew(tmp_path):
    folder = run(small(record__storage="sqlite", population__rounds=2), out=tmp_path / "run")
    resume(folder, rounds=3)
    assert whole(folder)


def test_force_clears_a_study_and_what_is_beside_it(tmp_path):
    folder = run(small(record__storage="sqlite", population__rounds=1), out=tmp_path / "run")
    (folder / "study.db-wal").touch()
    run(small(population__rounds=1), out=folder, force=True)
    assert not list(folder.glob("study.db*"))


# --- the id --------------------------------------------------------------------------------------


def test_a_run_has_an_id_from_its_start_and_keeps_it(tmp_path):
    folder = stopped(small(), tmp_path / "run")
    id = read_inputs_of(folder).id
    assert len(id) == 32
    changed(folder, completions=1)
    resume(folder)
    assert read_inputs_of(folder).id == id
    resume(folder, rounds=4)
    assert read_inputs_of(folder).id == id
    assert read_inputs_of(run(small(population__rounds=1), out=tmp_path / "other")).id != id


def test_a_run_of_an_earlier_version_gets_one_where_it_is_needed(plain, tmp_path, url):
    folder = shutil.copytree(plain, tmp_path / "old")
    with RunDir.open(folder) as opened:
        opened.write_inputs(asdict(replace(read_inputs_of(folder), id="")))
    verify(folder)
    resume(folder)
    assert read_inputs_of(folder).id == ""
    deliver(folder, storage=url)
    id = read_inputs_of(folder).id
    assert id
    deliver(folder, storage=url)
    assert read_inputs_of(folder).id == id
    assert len(optuna.get_all_study_names(url)) == 1
    assert verify(folder).damage == []


# --- elsewhere -----------------------------------------------------------------------------------


def test_a_run_with_a_database_is_the_run_with_a_journal(plain, tmp_path, url):
    folder = run(small(record__storage=url), out=tmp_path / "run")
    assert same_but_for_the_study(plain, folder)
    assert whole(folder, url)
    assert not list(folder.glob("study.db*"))
    assert verify(folder).damage == verify(folder).notes == []


def test_a_stopped_run_delivers_the_rest(plain, tmp_path, url):
    folder = stopped(small(record__storage=url), tmp_path / "run")
    resume(folder)
    assert same_but_for_the_study(plain, folder)
    assert whole(folder, url)
    resume(folder, rounds=4)
    assert whole(folder, url)


def test_a_storage_may_change_between_rounds_and_gets_all_of_them(plain, tmp_path, url):
    folder = stopped(small(), tmp_path / "run")
    changed(folder, storage=url)
    resume(folder)
    assert whole(folder, url)
    assert same_but_for_the_study(plain, folder)
    changes = read_inputs_of(folder).changes
    assert [(one["round"], one["name"], one["to"]) for one in changes] == [
        (2, "record.storage", url)
    ]
    assert verify(folder).damage == []


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        (GONE, r"port 1 failed: Connection refused.*start the server.*PGPASSWORD"),
        ("sqlite:////no/such/folder/x.db", r"unable to open database file; create the folder"),
    ],
)
def test_a_database_that_cannot_be_used_is_named_before_there_is_a_folder(
    tmp_path, storage, message
):
    with pytest.raises(ConfigError, match=rf"^record\.storage: {storage[:6]}.*{message}"):
        run(small(record__storage=storage), out=tmp_path / "run")
    population = GRPO.population(size=2, model="tiny-sums")
    with pytest.raises(ConfigError, match=message):
        population.train("sums", storage=storage, out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_missing_driver_is_named_before_there_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(storages, "find_spec", lambda name: None)
    with pytest.raises(EngineUnavailable, match=r"evo-grpo\[postgres\]"):
        run(small(record__storage=GONE), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_database_that_is_gone_when_a_run_goes_on_does_not_stop_it(
    plain, tmp_path, url, monkeypatch
):
    monkeypatch.setattr(delivery, "SECONDS_WITHOUT_TRIAL", 0.5)
    folder = stopped(small(), tmp_path / "run")
    changed(folder, storage=GONE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resume(folder)
    texts = [str(one.message) for one in caught if one.category is UserWarning]
    # A run that ends before the first attempt has failed says it at its end alone.
    assert all("cannot be reached" in text for text in texts[:-1])
    assert "not all trials are in" in texts[-1]
    assert texts[-1].endswith(f"deliver the rest with: evo-grpo deliver {folder}")
    assert same_but_for_the_study(plain, folder)
    # Asked again, a finished run says the same and is left as it is.
    with pytest.warns(UserWarning, match=r"record\.storage: .*cannot be used"):
        resume(folder)
    (one,) = deliver(folder, storage=url)
    assert (one.run, one.added, one.rounds) == (folder, 9, 3)
    assert whole(folder, url)


def test_before_the_first_round_a_resume_refuses_it_too(tmp_path):
    folder = stopped(small(), tmp_path / "run", at=("learn", 0))
    changed(folder, storage=GONE)
    with pytest.raises(ConfigError, match="cannot be used"):
        resume(folder)


def test_a_finished_run_delivers_what_it_could_not(tmp_path, url):
    folder = run(small(record__storage=url, population__rounds=1), out=tmp_path / "run")
    optuna.delete_study(study_name=study_of(folder)[0], storage=url)
    resume(folder)
    assert whole(folder, url)


def test_deliver_takes_the_populations_of_a_comparison_too(tmp_path, url):
    config = small(record__storage=url, population__rounds=1, population__size=2)
    folder = run(config, out=tmp_path / "run")
    compare(folder)
    arms = [folder, folder / "compare" / "guess", folder / "compare" / "random"]
    names = [study_of(arm)[0] for arm in arms]
    assert sorted(names) == sorted(optuna.get_all_study_names(url))
    assert [one.added for one in deliver(folder)] == [0, 0, 0]
    for name in names:
        optuna.delete_study(study_name=name, storage=url)
    assert [(one.run, one.study, one.added) for one in deliver(folder)] == [
        (arm, name, 2) for arm, name in zip(arms, names, strict=True)
    ]


def test_deliver_refuses_what_it_cannot_do(plain, tmp_path, url):
    for folder in (plain, run(small(record__storage="sqlite", population__rounds=1),
                              out=tmp_path / "run")):  # fmt: skip
        with pytest.raises(ConfigError, match=r"outside of its folder.*name one with --storage"):
            deliver(folder)
    with pytest.raises(ConfigError, match="cannot be used"):
        deliver(plain, storage=GONE)
    with pytest.raises(ConfigError, match="without a password") as caught:
        deliver(plain, storage="postgresql+psycopg://evo:hunter2@h/evo")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(RunNotFoundError):
        deliver(tmp_path, storage=url)
    with RunDir.open(plain), pytest.raises(RunDirError, match="in use by process"):
        deliver(plain, storage=url)


def test_a_run_recorded_in_python_is_delivered_too(tmp_path, url):
    from evo_grpo.evolve.select.halving import HalvingSelection

    class Mine:
        """A selection of one's own: such a run cannot be resumed."""

        def plan(self, histories, places, rng):
            return HalvingSelection().plan(histories, places, rng)

    population = GRPO.population(size=2, model="tiny-sums", group_size=4, prompts_per_step=2)
    population.train(
        "sums",
        name="mine",
        rounds=2,
        steps_per_round=1,
        selection=Mine(),
        fitness={"prompts": 4, "test_prompts": 4, "test_samples": 1, "final_samples": 0},
        storage=url,
        out=tmp_path / "run",
        progress=False,
    )
    assert whole(tmp_path / "run", url)
    optuna.delete_study(study_name=study_of(tmp_path / "run")[0], storage=url)
    (one,) = deliver(tmp_path / "run")
    assert one.added == sum(len(record.agents) for record in read_rounds(tmp_path / "run"))
    assert json.loads((tmp_path / "run" / "inputs.json").read_text())["id"] in one.study
