"""The study in a run folder: made from the rounds, and made anew where it is anything else."""

import errno
import hashlib
import json
import logging
import os
import shutil
import sqlite3
import time
from dataclasses import replace
from types import SimpleNamespace

import optuna
import pytest
from optuna.storages import InMemoryStorage
from random_runs import HP_CONFIG, make_run, timed, with_scores

from evo_grpo.errors import RunDirError, RunFailedError
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.run_dir import RunDir
from evo_grpo.record.study import FolderStudy, open_study
from evo_grpo.settings import from_dict
from evo_grpo.types import Member, Mutation, Score, Slot

ID = "0123"
FILES = {None: "journal.log", "sqlite": "study.db"}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Optuna waits up to ten seconds in all before it gives a failed write up."""
    from optuna.storages._rdb import storage

    monkeypatch.setattr(storage, "time", SimpleNamespace(sleep=lambda seconds: None))


@pytest.fixture(params=FILES, ids=FILES.values())
def kind(request):
    return request.param


@pytest.fixture
def records():
    return timed(make_run(size=3, rounds=4, failures=0.2))


def config_of(kind):
    record = {} if kind is None else {"storage": kind}
    return from_dict({"name": "small", "model": "tiny-sums", "env": "sums", "record": record})


def go_on(folder, kind):
    """Open the study of a run as a resume does; returns the trials that it had from before."""
    with RunDir.open(folder) as run:
        run.drop_unfinished()
        study = FolderStudy(run, config_of(kind), ID, HP_CONFIG)
        before = len(trials(folder, kind))
        study.record(run.rounds())
        return before


def written(path, records, kind, count=None):
    """A run folder with rounds, and the study of the first of them."""
    with RunDir.create(path, "small", "name: small\n") as run:
        study = FolderStudy(run, config_of(kind), ID, HP_CONFIG)
        for record in records[:count]:
            study.record([record])
        for record in records:
            run.append_round(record)
    return path


def copied(path, records, kind, count=None):
    """The same as `written`, copied from a folder that is written once per session.

    SQLite commits each attribute of a trial, which makes a study slow to write.
    """
    digest = hashlib.sha256(repr(records).encode()).hexdigest()[:12]
    template = path.parent.parent / f"study-{kind}-{count}-{digest}"
    if not template.exists():
        written(template, records, kind, count)
    return shutil.copytree(template, path)


def storage_of(folder, kind):
    """The study as everybody else opens it."""
    if kind is None:
        backend = optuna.storages.journal.JournalFileBackend(str(folder / "journal.log"))
        return "small", optuna.storages.JournalStorage(backend)
    return f"small-{ID}", f"sqlite:///{folder / 'study.db'}"


def trials(folder, kind):
    name, storage = storage_of(folder, kind)
    return optuna.load_study(study_name=name, storage=storage).trials


def said(trial):
    """All that a trial says; its id is the storage's own."""
    return (
        *(trial.number, trial.state, trial.values, trial.params, trial.distributions),
        *(trial.user_attrs, trial.intermediate_values, trial.system_attrs),
        *(trial.datetime_start, trial.datetime_complete),
    )


def expected(records):
    lineage = Lineage(open_study(InMemoryStorage(), "small"), HP_CONFIG)
    for record in records:
        lineage.record(record)
    return [said(trial) for trial in lineage.study.trials]


def test_everybody_reads_the_trials_of_the_rounds(tmp_path, records, kind):
    folder = written(tmp_path / "run", records, kind)
    assert [said(trial) for trial in trials(folder, kind)] == expected(records)
    name, storage = storage_of(folder, kind)
    study = optuna.load_study(study_name=name, storage=storage)
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE
    assert study.metric_names == ["fitness"]
    assert [path.name for path in folder.glob("study.db*")] == ["study.db"] * (kind is not None)


def test_a_study_that_is_whole_is_left_as_it_is(tmp_path, records, kind):
    folder = copied(tmp_path / "run", records, kind)
    before = (folder / FILES[kind]).read_bytes()
    assert go_on(folder, kind) == 12
    assert (folder / FILES[kind]).read_bytes().startswith(before)


@pytest.mark.parametrize("count", [0, 2])
def test_trials_that_are_missing_at_the_end_are_added(tmp_path, records, kind, count):
    folder = copied(tmp_path / "run", records, kind, count)
    assert go_on(folder, kind) == 3 * count
    assert [said(trial) for trial in trials(folder, kind)] == expected(records)


def test_a_round_of_which_some_trials_are_missing_gets_the_rest(tmp_path, records, kind):
    half = [records[0], replace(records[1], agents=records[1].agents[:1])]
    folder = written(tmp_path / "run", half, kind)
    (folder / "rounds.jsonl").write_bytes(b"")
    with RunDir.open(folder) as run:
        for record in records:
            run.append_round(record)
    assert go_on(folder, kind) == 4
    assert [said(trial) for trial in trials(folder, kind)] == expected(records)


def lines_of(folder):
    return (folder / "journal.log").read_bytes().splitlines(keepends=True)


def lose_a_trial(folder, kind):
    """In the middle."""
    if kind is None:
        lines = lines_of(folder)
        (place, *_) = [n for n, line in enumerate(lines) if b"user_attrs" in line][3:]
        (folder / "journal.log").write_bytes(b"".join([*lines[:place], *lines[place + 1 :]]))
    else:
        sql(folder, "DELETE FROM trials WHERE number = 3")


def change_a_trial(folder, kind):
    if kind is None:
        data = (folder / "journal.log").read_bytes()
        (folder / "journal.log").write_bytes(data.replace(b'"seed":17', b'"seed":18', 1))
    else:
        sql(folder, "UPDATE trial_user_attributes SET value_json = '18' WHERE value_json = '17'")


def add_a_trial(folder, kind):
    name, storage = storage_of(folder, kind)
    study = optuna.load_study(study_name=name, storage=storage)
    study.add_trial(optuna.trial.create_trial(value=1.0))


def add_a_study(folder, kind):
    optuna.create_study(study_name="other", storage=storage_of(folder, kind)[1])


def of_another_run(folder, kind):
    others = timed(make_run(size=3, rounds=4, seed=5))
    other = copied(folder.with_name("other"), others, kind)
    shutil.copy(other / FILES[kind], folder / FILES[kind])


def nonsense(folder, kind):
    (folder / FILES[kind]).write_bytes(b"nothing of a study\n" * 300)


def half(folder, kind):
    file = folder / FILES[kind]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def gone(folder, kind):
    (folder / FILES[kind]).unlink()


def empty(folder, kind):
    (folder / FILES[kind]).write_bytes(b"")


def sql(folder, statement):
    with sqlite3.connect(folder / "study.db") as connection:
        connection.execute(statement)
    connection.close()


DAMAGES = [
    *(lose_a_trial, change_a_trial, add_a_trial, add_a_study, of_another_run),
    *(nonsense, half, gone, empty),
]


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        *((None, damage) for damage in DAMAGES),
        # What the trials of a readable file say is compared in one way.
        *(("sqlite", damage) for damage in (lose_a_trial, add_a_study, nonsense, half, gone)),
    ],
)
def test_a_study_that_is_anything_else_is_made_anew(tmp_path, records, kind, damage):
    folder = copied(tmp_path / "run", records, kind)
    damage(folder, kind)
    assert go_on(folder, kind) == 0
    assert [said(trial) for trial in trials(folder, kind)] == expected(records)
    assert go_on(folder, kind) == 12


@pytest.mark.parametrize(
    "line",
    [
        b'{"half a li',  # Optuna would read it as nothing, and write the next line behind it
        b"{broken\n",
        b'{"op_code":99,"worker_id":"x"}\n',
        b'{"op_code":4,"worker_id":"x","study_id":0,"datetime_start":null,"user_attrs":[]}\n',
        b'{"op_code":0,"worker_id":"x","study_name":"other","directions":[7]}\n',
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_any_damaged_line_of_the_journal_has_it_made_anew(tmp_path, records, line, last):
    folder = copied(tmp_path / "run", records, None)
    lines = lines_of(folder)
    rest = [] if last else lines[6:]
    (folder / "journal.log").write_bytes(b"".join([*lines[:6], line, *rest]))
    assert go_on(folder, None) == 0
    assert [said(trial) for trial in trials(folder, None)] == expected(records)
    assert all(isinstance(json.loads(line), dict) for line in lines_of(folder))


@pytest.mark.parametrize("aside", ["study.db-journal", "study.db-wal", "study.db-shm"])
def test_what_a_killed_process_was_writing_is_not_taken_up(tmp_path, records, aside):
    """SQLite would play its journal back, and a journal can name another file to be deleted."""
    folder = copied(tmp_path / "run", records, "sqlite")
    (folder / aside).write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + b"\0" * 504)
    assert go_on(folder, "sqlite") == 0
    assert not (folder / aside).exists()
    assert [said(trial) for trial in trials(folder, "sqlite")] == expected(records)


def test_a_path_that_means_something_in_a_url_is_a_path(tmp_path, records):
    folder = written(tmp_path / "what?mode=ro#x%20", records, "sqlite")
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    folder.rename(tmp_path / "run")
    assert go_on(tmp_path / "run", "sqlite") == 12


def test_a_file_with_a_second_name_is_refused(tmp_path, records, kind):
    folder = copied(tmp_path / "run", records, kind)
    os.link(folder / FILES[kind], tmp_path / "victim")
    before = (tmp_path / "victim").read_bytes()
    with pytest.raises(RunDirError, match="hard links"):
        go_on(folder, kind)
    assert (tmp_path / "victim").read_bytes() == before


@pytest.mark.parametrize("target", ["journal.log", "moved/journal.log", None])
def test_a_lock_whose_process_died_is_not_waited_for(tmp_path, records, target):
    folder = written(tmp_path / "run", records, None)
    lock = folder / "journal.log.lock"
    lock.touch() if target is None else lock.symlink_to(folder / target)
    (folder / "journal.log").unlink()
    start = time.monotonic()
    go_on(folder, None)
    assert time.monotonic() - start < 20  # Optuna waits 30 s
    assert not os.path.lexists(lock)


@pytest.mark.parametrize("name", ["open", "rename", "unlink", "fsync"])
@pytest.mark.parametrize("error", [errno.EROFS, errno.EIO])
def test_a_disk_that_refuses_the_journal_is_named_with_the_way_out(
    tmp_path, records, monkeypatch, name, error
):
    with RunDir.create(tmp_path / "run", "small", "name: small\n") as run:
        study = FolderStudy(run, config_of(None), ID, HP_CONFIG)

        def refused(*_, **__):
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(os, name, refused)
        message = rf"journal.log: cannot be written \({os.strerror(error)}\); .*resume"
        with pytest.raises(RunFailedError, match=message):
            study.record(records[:1])
        monkeypatch.undo()


def test_a_lock_that_cannot_be_given_back_leaves_no_file(tmp_path, records, monkeypatch):
    refused, unlink = [], os.unlink

    def once(path, *arguments, **options):
        if not refused and str(path).endswith(".rename"):
            refused.append(path)
            raise OSError(errno.EIO, "Input/output error")
        return unlink(path, *arguments, **options)

    monkeypatch.setattr(os, "unlink", once)
    folder = written(tmp_path / "run", records, None)
    assert refused
    assert [path.name for path in folder.glob("journal.log*")] == ["journal.log"]
    assert [said(trial) for trial in trials(folder, None)] == expected(records)


@pytest.mark.slow
def test_a_full_disk_of_sqlite_says_how_to_go_on(tmp_path, records, monkeypatch):
    folder = copied(tmp_path / "run", records, "sqlite", 1)
    connect = sqlite3.connect

    def full(*given, **named):
        connection = connect(*given, **named)
        connection.execute("PRAGMA max_page_count = 1")  # as many as there are
        return connection

    monkeypatch.setattr(sqlite3, "connect", full)
    with pytest.raises(RunFailedError, match=r"study\.db: cannot be written.*full.*resume"):
        go_on(folder, "sqlite")
    monkeypatch.undo()
    assert 3 <= go_on(folder, "sqlite") < 12
    assert [said(trial) for trial in trials(folder, "sqlite")] == expected(records)


@pytest.mark.slow
def test_the_mean_of_an_earlier_end_goes_when_the_run_goes_on(tmp_path, records, kind):
    """It would be a trial of a round that has others now."""
    parents = [agent.member for agent in records[2].agents[:2]]
    mean = Member(99, Slot(-1), parents[0], 3, Mutation("mean"), parents[1])
    with RunDir.create(tmp_path / "run", "small", "name: small\n") as run:
        study = FolderStudy(run, config_of(kind), ID, HP_CONFIG)
        for record in records[:3]:
            run.append_round(record)
            study.record([record])
        for _ in range(2):
            study.record_mean(mean, records[2], Score(0.5, 0.1, 8))
    assert [one.user_attrs["op"] for one in trials(run.path, kind)].count("mean") == 1
    assert go_on(run.path, kind) == 0
    assert [said(trial) for trial in trials(run.path, kind)] == expected(records[:3])


def test_a_study_in_sqlite_says_whose_it_is_and_keeps_up(tmp_path, records):
    folder = copied(tmp_path / "run", records, "sqlite")
    name, storage = storage_of(folder, "sqlite")
    study = optuna.load_study(study_name=name, storage=storage)
    assert study.user_attrs["name"] == "small"
    assert study.user_attrs["run_id"] == ID
    assert study.user_attrs["base"] == "tiny-sums"
    config = config_of("sqlite")
    longer = config.replace(population=config.population.replace(rounds=77))
    with RunDir.open(folder) as run:
        FolderStudy(run, longer, ID, HP_CONFIG)
    study = optuna.load_study(study_name=name, storage=storage)
    assert study.user_attrs["rounds"] == 77


def test_optuna_says_nothing_and_its_logging_stays_as_it_was(tmp_path, records, kind, capfd):
    logger = logging.getLogger("optuna")
    before = (logger.level, list(logger.handlers), [list(h.filters) for h in logger.handlers])
    folder = written(tmp_path / "run", records, kind)
    go_on(folder, kind)
    after = (logger.level, list(logger.handlers), [list(h.filters) for h in logger.handlers])
    assert before == after
    assert capfd.readouterr() == ("", "")


def test_a_failed_trial_that_became_a_good_one_is_another_trial(tmp_path, records, kind):
    folder = copied(tmp_path / "run", records, kind)
    (folder / "rounds.jsonl").write_bytes(b"")
    other = [with_scores(records[0], [0.5, 0.25, None]), *records[1:]]
    with RunDir.open(folder) as run:
        for record in other:
            run.append_round(record)
    assert go_on(folder, kind) == 0
    assert [said(trial) for trial in trials(folder, kind)] == expected(other)
