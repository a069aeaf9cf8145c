"""Connections to a database of several runs: refusals in its own words, tables made once."""

import builtins
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import optuna
import pytest
from small_run import small

from evo_grpo import GRPO, resume, run
from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.record.database import DatabaseError, check_url
from evo_grpo.settings import load, to_yaml

#: Nothing listens on it: port 1 is not given to programs.
GONE = "postgresql+psycopg://evo@127.0.0.1:1/evo"


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'shared.db'}"


def test_tables_of_another_optuna_are_named(url, tmp_path):
    check_url(url)
    with sqlite3.connect(tmp_path / "shared.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'v99.0.0.a'")
    connection.close()
    with pytest.raises(DatabaseError, match="no longer compatible with the table schema"):
        check_url(url)


def test_a_driver_that_cannot_be_imported_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *given, **named):
        if name.split(".")[0] == "psycopg":
            raise ModuleNotFoundError("No module named 'psycopg'")
        return real(name, *given, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EngineUnavailable, match=r"No module named 'psycopg'.*evo-grpo\[postgres\]"):
        check_url(GONE)


def test_a_look_at_a_database_leaves_no_study(url):
    for _ in range(2):
        check_url(url)
    assert optuna.get_all_study_names(url) == []


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
    with pytest.raises(ConfigError, match=rf"^record\.storage: {storage[:6]}.*{message}") as caught:
        run(small(record__storage=storage), out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    population = GRPO.population(size=2, model="tiny-sums")
    with pytest.raises(ConfigError, match=message):
        population.train("sums", storage=storage, out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_database_that_is_gone_when_a_run_goes_on_does_not_stop_it(tmp_path):
    from small_run import Told

    for stop in (("learn", 0), ("learn", 1)):
        folder = tmp_path / f"run-{stop[1]}"
        with pytest.raises(KeyboardInterrupt):
            run(small(population__rounds=2), out=folder, observer=Told(stop))
        config = load(folder / "population.yaml")
        config = config.replace(record=config.record.replace(storage=GONE))
        (folder / "population.yaml").write_text(to_yaml(config))
    with pytest.raises(ConfigError, match="cannot be used"):
        resume(tmp_path / "run-0")  # no round is lost yet
    with pytest.warns(UserWarning, match=r"optuna .*(retrying|evo-grpo follow .* --to optuna)"):
        resume(tmp_path / "run-1")
    with pytest.warns(UserWarning, match="evo-grpo follow"):
        resume(tmp_path / "run-1")  # its readers lack all of it
    assert (tmp_path / "run-1" / "summary.json").exists()


@pytest.mark.slow
def test_tables_that_many_make_at_once_are_made_once(tmp_path):
    for number in range(2):
        url = f"sqlite:///{tmp_path / f'{number}.db'}"
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(check_url, [url] * 6))
        assert optuna.get_all_study_names(url) == []
