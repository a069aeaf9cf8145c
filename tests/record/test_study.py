"""The study in a run folder: a function of the log, whatever the file held before."""

import logging
import os
import sqlite3
from types import SimpleNamespace

import optuna
import pytest
from fed_studies import SPACE, expected, said
from random_runs import make_run, timed
from small_run import SETTINGS

from evo_grpo.errors import RunFailedError
from evo_grpo.record.log import RoundDone
from evo_grpo.record.run_dir import RunDir
from evo_grpo.record.study import StudyReader, write_study
from evo_grpo.settings import from_dict, to_yaml

ID = "0123"
FILES = {None: "journal.log", "sqlite": "study.db"}


@pytest.fixture(params=FILES, ids=FILES.values())
def kind(request):
    return request.param


@pytest.fixture
def records():
    return timed(make_run(size=3, rounds=4, failures=0.2))


def run_of(path, records, kind):
    """A run folder with rounds and without a study."""
    settings = {**SETTINGS, "record": {"storage": kind}, "evolve": {"hyperparameters": SPACE}}
    with RunDir.create(path, "small", to_yaml(from_dict(settings))) as run:
        for record in records:
            run.append_round(record)
    return path


def storage_of(folder, kind):
    """The study as everybody else opens it."""
    if kind is None:
        backend = optuna.storages.journal.JournalFileBackend(str(folder / "journal.log"))
        return "small", optuna.storages.JournalStorage(backend)
    return f"small-{ID}", f"sqlite:///{folder / 'study.db'}"


def study_in(folder, kind):
    name, storage = storage_of(folder, kind)
    return optuna.load_study(study_name=name, storage=storage)


def trials(folder, kind):
    return [said(trial) for trial in study_in(folder, kind).trials]


def test_everybody_reads_the_trials_of_the_rounds(tmp_path, records, kind):
    folder = run_of(tmp_path / "run", records, kind)
    for _ in range(2):
        write_study(folder, ID)
        assert trials(folder, kind) == expected(records)
    study = study_in(folder, kind)
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE
    assert study.metric_names == ["fitness"]
    assert (study.user_attrs.get("run_id") == ID) == (kind is not None)
    assert not list(folder.glob(".*.tmp"))


def test_a_study_that_is_anything_else_is_replaced(tmp_path, records, kind):
    folder = run_of(tmp_path / "run", records, kind)
    file = folder / FILES[kind]
    file.write_bytes(b"nothing of a study\n" * 300)
    os.link(file, tmp_path / "victim")
    # SQLite would replay a journal beside its file, which can name another file to be deleted.
    asides = [folder / f"study.db{end}" for end in ("-journal", "-wal", "-shm")]
    for aside in asides if kind == "sqlite" else []:
        aside.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + b"\0" * 504)
    write_study(folder, ID)
    assert trials(folder, kind) == expected(records)
    assert not any(aside.exists() for aside in asides)
    assert (tmp_path / "victim").read_bytes().startswith(b"nothing")
    file.unlink()
    file.symlink_to(tmp_path / "victim")
    write_study(folder, ID)
    assert not file.is_symlink()
    assert (tmp_path / "victim").read_bytes().startswith(b"nothing")


def test_a_reader_writes_the_file_as_the_run_goes_on_and_waits_the_longer_the_slower_it_is(
    tmp_path, records, kind, monkeypatch
):
    folder = run_of(tmp_path / "run", records, kind)
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("evo_grpo.record.study.time", clock)
    reader = StudyReader(folder, ID)
    reader.read(RoundDone(1, records[0]))
    assert reader.flush()
    assert len(trials(folder, kind)) == 3
    reader._next = 101.0  # the file took a tenth of a second
    reader.read(RoundDone(2, records[1]))
    assert not reader.flush()
    assert len(trials(folder, kind)) == 3
    now[0] += 2
    assert reader.flush()
    assert len(trials(folder, kind)) == 6
    reader.read(RoundDone(2, records[1]))  # its plan changed
    reader.read(RoundDone(3, records[2]))
    reader.read(RoundDone(4, records[3]))
    reader.close()
    assert trials(folder, kind) == expected(records)


def test_a_path_that_means_something_in_a_url_is_a_path(tmp_path, records):
    folder = run_of(tmp_path / "what?mode=ro#x%20", records, "sqlite")
    write_study(folder, ID)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    with sqlite3.connect(folder / "study.db") as database:
        assert database.execute("SELECT count(*) FROM trials").fetchone() == (12,)
    database.close()


def test_a_disk_that_refuses_the_file_is_named_with_the_way_out(
    tmp_path, records, kind, monkeypatch
):
    folder = run_of(tmp_path / "run", records, kind)
    write_study(folder, ID)
    before = trials(folder, kind)

    def refused(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refused)
        message = rf"{FILES[kind]}.*No space left.*evo-grpo follow --to optuna"
        with pytest.raises(RunFailedError, match=message):
            write_study(folder, ID)
    assert trials(folder, kind) == before


def test_optuna_says_nothing_and_its_logging_stays_as_it_was(tmp_path, records, kind, capfd):
    logger = logging.getLogger("optuna")
    before = (logger.level, list(logger.handlers), [list(h.filters) for h in logger.handlers])
    write_study(run_of(tmp_path / "run", records, kind), ID)
    after = (logger.level, list(logger.handlers), [list(h.filters) for h in logger.handlers])
    assert before == after
    assert capfd.readouterr() == ("", "")
