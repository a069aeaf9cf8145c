"""Trials in SQLite: the same as elsewhere, each once, in a file that leads nowhere."""

import os
import sqlite3
from datetime import datetime
from types import SimpleNamespace

import optuna
import pytest
from optuna.storages import InMemoryStorage, RDBStorage
from random_runs import HP_CONFIG, make_run, timed
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from evo_grpo.errors import CheckpointError, EngineUnavailable, RunDirError, RunFailedError
from evo_grpo.record import database
from evo_grpo.record.database import Unreachable, check_url, open_file, open_url
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.trials import StudyChanged

NAME = "small-0123"
#: Nothing listens on it: port 1 is not given to programs.
GONE = "postgresql+psycopg://evo@127.0.0.1:1/evo"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Optuna waits up to ten seconds in all before it gives a failed write up."""
    from optuna.storages._rdb import storage

    monkeypatch.setattr(storage, "time", SimpleNamespace(sleep=lambda seconds: None))


@pytest.fixture
def records():
    return timed(make_run(size=4, rounds=4, failures=0.2))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "study.db"


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'shared.db'}"


def told(trial):
    """All that a trial says; its id is the storage's own."""
    return (
        *(trial.number, trial.state, trial.values, trial.params, trial.distributions),
        *(trial.user_attrs, trial.intermediate_values, trial.system_attrs),
        *(trial.datetime_start, trial.datetime_complete),
    )


def test_a_database_has_the_trials_that_memory_has(file, records):
    memory = Lineage(InMemoryStorage(), NAME, HP_CONFIG)
    memory.record_all(records)
    with open_file(file, NAME, {}) as study:
        Lineage(study, hp_config=HP_CONFIG).record_all(records)
    with open_file(file, NAME, {}) as study:
        lineage = Lineage(study, hp_config=HP_CONFIG)
        assert [told(t) for t in lineage.trials()] == [told(t) for t in memory.trials()]
        assert lineage.differing(records) == []
        assert not lineage.contradicts(records)
    # And as everybody else reads it.
    loaded = optuna.load_study(study_name=NAME, storage=f"sqlite:///{file}")
    assert [told(t) for t in loaded.trials] == [told(t) for t in memory.trials()]
    assert loaded.direction == optuna.study.StudyDirection.MAXIMIZE
    assert loaded.metric_names == ["fitness"]


def test_earlier_records_get_times_and_metrics_where_they_can(file):
    """A database has no trials of earlier versions that would have to stay as they are."""
    records = make_run(size=2, rounds=2)
    with open_file(file, NAME, {}) as study:
        lineage = Lineage(study, hp_config=HP_CONFIG)
        lineage.record_all(records)
        trials = lineage.trials()
        assert lineage.differing(records) == []
    assert all(trial.user_attrs["train/reward"] == 0.5 for trial in trials)
    assert all(trial.datetime_start <= datetime.now() for trial in trials)


def test_a_study_says_whose_it_is_and_keeps_up(file):
    with open_file(file, NAME, {"name": "small", "rounds": 3}):
        pass
    with open_file(file, NAME, {"name": "small", "rounds": 5}):
        pass
    loaded = optuna.load_study(study_name=NAME, storage=f"sqlite:///{file}")
    assert loaded.user_attrs == {"name": "small", "rounds": 5}


def test_only_outlines_of_trials_stay_in_memory(file, records):
    with open_file(file, NAME, {}) as study:
        lineage = Lineage(study, hp_config=HP_CONFIG)
        lineage.record_all(records)
        for held, whole in zip(study.get_trials(), study.whole_trials(), strict=True):
            assert (held.number, held.state, held.value) == (whole.number, whole.state, whole.value)
            assert set(held.user_attrs) == {"agent", "round", "member"}
            assert (held.params, held.distributions, held.intermediate_values) == ({}, {}, {})
            assert whole.params


def test_a_trial_of_another_writer_is_seen_and_not_added_again(url, records):
    with open_url(url, NAME, {}) as ours, open_url(url, NAME, {}) as theirs:
        first, second = (Lineage(study, hp_config=HP_CONFIG) for study in (ours, theirs))
        first.record(records[0])
        second.record_all(records[:2])
        assert (first.added, second.added) == (4, 4)
        first.record_all(records)
        assert (first.added, second.added) == (12, 4)
        assert len(first.trials()) == 16
        assert first.differing(records) == []


def test_a_number_that_is_taken_adds_nothing(url, records):
    with open_url(url, NAME, {}) as ours, open_url(url, NAME, {}) as theirs:
        Lineage(theirs, hp_config=HP_CONFIG).record(records[0])
        trial = theirs.whole_trials()[0]
        with pytest.raises(StudyChanged, match="expected trial 0 to be next, got 4"):
            ours.add_trial(trial)
        assert len(ours.whole_trials()) == 4
        assert len(ours.get_trials()) == 4


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_trial_whose_writing_is_not_confirmed_is_there_once(url, records, monkeypatch, confirmed):
    """The connection breaks while a trial is written: behind the commit, or before it."""
    commit, calls = Session.commit, []

    def breaking(session):
        calls.append(1)
        if len(calls) in (3, 9):
            if confirmed:
                commit(session)
            raise OperationalError("COMMIT", {}, Exception("the connection is gone"))
        commit(session)

    with open_url(url, NAME, {}) as study:
        lineage = Lineage(study, hp_config=HP_CONFIG)
        monkeypatch.setattr(Session, "commit", breaking)
        for record in records:
            try:
                lineage.record(record)
            except Unreachable:  # from one of the questions between
                lineage.record(record)
        monkeypatch.undo()
        assert len(calls) > 16
        assert lineage.differing(records) == []
        assert len(lineage.trials()) == 16


def test_optuna_still_adds_trials_in_the_way_that_is_built_on(url, records, monkeypatch):
    """Both methods are Optuna's own: another release may go another way without a sign of it."""
    calls = []
    for name in ("_get_prepared_new_trial", "_set_trial_attr_without_commit"):
        assert hasattr(RDBStorage, name)
        ours = getattr(database.NumberedStorage, name)
        monkeypatch.setattr(
            database.NumberedStorage,
            name,
            lambda *given, ours=ours, name=name, **named: (
                calls.append(name) or ours(*given, **named)
            ),
        )
    with open_url(url, NAME, {}) as study:
        Lineage(study, hp_config=HP_CONFIG).record(records[0])
    assert calls.count("_get_prepared_new_trial") == 4
    assert calls.count("_set_trial_attr_without_commit") > 4 * 10


def test_a_deleted_study_is_told_and_made_again(url, records):
    with open_url(url, NAME, {}) as study:
        lineage = Lineage(study, hp_config=HP_CONFIG)
        lineage.record(records[0])
        optuna.delete_study(study_name=NAME, storage=url)
        with pytest.raises(Unreachable, match="somebody deleted the study"):
            lineage.record(records[1])
    with open_url(url, NAME, {}) as study:
        assert study.whole_trials() == []


def test_a_server_that_is_not_there_is_named_in_its_own_words():
    with pytest.raises(
        Unreachable, match=r"127\.0\.0\.1.*port 1 failed: Connection refused"
    ) as told:
        check_url(GONE)
    assert "\n" not in str(told.value)
    with pytest.raises(Unreachable, match="unable to open database file"):
        check_url("sqlite:////no/such/folder/x.db")


def test_tables_of_another_optuna_are_told(url, tmp_path):
    check_url(url)
    with sqlite3.connect(tmp_path / "shared.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'v99.0.0.a'")
    connection.close()
    with pytest.raises(Unreachable, match="no longer compatible with the table schema"):
        check_url(url)


def test_a_driver_that_cannot_be_imported_is_named(monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *given, **named):
        if name.split(".")[0] == "psycopg":
            raise ModuleNotFoundError("No module named 'psycopg'")
        return real(name, *given, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EngineUnavailable, match=r"No module named 'psycopg'.*evo-grpo\[postgres\]"):
        check_url(GONE)


@pytest.mark.parametrize("name", ["study.db", "study.db-journal", "study.db-wal", "study.db-shm"])
def test_links_lead_nowhere(file, records, name):
    victim = file.with_name("victim")
    victim.write_text("keep")
    with open_file(file, NAME, {}) as study:
        Lineage(study, hp_config=HP_CONFIG).record(records[0])
    if name == file.name:
        file.unlink()
        file.symlink_to(victim)
        with pytest.raises(RunDirError, match="got a link to"):
            open_file(file, NAME, {})
        file.unlink()
        os.link(victim, file)
        with pytest.raises(RunDirError, match="hard links"):
            open_file(file, NAME, {})
    else:
        file.with_name(name).symlink_to(victim)
        with open_file(file, NAME, {}) as study:
            Lineage(study, hp_config=HP_CONFIG).record(records[0])
        assert not os.path.lexists(file.with_name(name))
    assert victim.read_text() == "keep"


def test_a_link_that_comes_later_is_refused_too(file, records):
    victim = file.with_name("victim")
    with open_file(file, NAME, {}) as study:
        file.with_name("study.db-journal").symlink_to(victim)
        with pytest.raises(RunDirError, match=r"study\.db-journal: .*got a link"):
            Lineage(study, hp_config=HP_CONFIG).record(records[0])
    assert not victim.exists()


def test_what_a_killed_process_was_writing_is_not_taken_up(file, records):
    """SQLite would play its journal back, and a journal can name another file to be deleted."""
    with open_file(file, NAME, {}) as study:
        Lineage(study, hp_config=HP_CONFIG).record_all(records)
    file.with_name("study.db-journal").write_bytes(
        b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + b"\0" * 504
    )
    with open_file(file, NAME, {}) as study:
        assert study.whole_trials() == []
        assert Lineage(study, hp_config=HP_CONFIG).differing(records)
    assert not file.with_name("study.db-journal").exists()


def test_a_damaged_file_is_named_with_the_way_out(file, records):
    with open_file(file, NAME, {}) as study:
        Lineage(study, hp_config=HP_CONFIG).record_all(records)
    whole = file.read_bytes()
    for damaged in (b"no database" * 1000, whole[:4096] + b"\xff" * (len(whole) - 4096)):
        file.write_bytes(damaged)
        with pytest.raises(
            CheckpointError, match=r"study\.db: .*damaged.*delete it.*rounds\.jsonl"
        ):
            open_file(file, NAME, {})
    with sqlite3.connect(file.with_name("other.db")) as connection:
        connection.execute("CREATE TABLE trials (of_others TEXT)")
    connection.close()
    with pytest.raises(CheckpointError, match=r"other\.db: .*damaged"):
        open_file(file.with_name("other.db"), NAME, {})


def test_a_full_disk_says_how_to_go_on(file, records, monkeypatch):
    with open_file(file, NAME, {}) as study:
        lineage = Lineage(study, hp_config=HP_CONFIG)
        lineage.record(records[0])
        connect = sqlite3.connect

        def full(*given, **named):
            connection = connect(*given, **named)
            connection.execute("PRAGMA max_page_count = 1")  # as many as there are
            return connection

        with monkeypatch.context() as patch:
            patch.setattr(database.sqlite3, "connect", full)
            with pytest.raises(RunFailedError, match=r"study\.db: cannot be written.*full.*resume"):
                lineage.record_all(records)
        lineage.record_all(records)
        assert lineage.differing(records) == []
