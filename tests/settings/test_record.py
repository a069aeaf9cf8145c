"""The group `record`: what a URL of trials may say, whose password is never repeated."""

import pytest

from evo_grpo import GRPO
from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.settings import RecordConfig, from_dict, load, to_yaml
from evo_grpo.settings import record as storages
from evo_grpo.settings.trackers import TrackerConfig

SECRET = "hunter2"
MINIMAL = {"model": "tiny-sums", "env": "sums"}

GOOD = [
    None,
    "sqlite",
    "sqlite:///trials.db",
    "sqlite:////tmp/my folder/a@b:c.db",
    "postgresql+psycopg://evo@127.0.0.1:5432/evo",
    "postgresql+psycopg://evo@[::1]:5432/evo",
    "postgresql+psycopg://db.example.org/evo",
    "postgresql+psycopg:///evo",
    "postgresql+psycopg://evo@/evo?host=/run/postgresql",
    "postgresql+psycopg://evo@h/evo?sslmode=verify-full&passfile=/home/me/.pgpass",
]
WITH_PASSWORD = [
    f"postgresql+psycopg://evo:{SECRET}@h:5432/evo",
    f"postgresql+psycopg://:{SECRET}@h/evo",
    "postgresql+psycopg://evo:@h/evo",
    f"postgresql+psycopg://evo:{SECRET}/x@h/evo",
    f"postgresql+psycopg://evo:{SECRET}@@h/evo",
    f"postgresql+psycopg://h:5432/evo?a={SECRET}@b",
    f"postgresql+psycopg://h/evo?password={SECRET}",
    f"postgresql+psycopg://h/evo?sslmode=require&PASSWORD={SECRET}",
    f"postgresql+psycopg://h/evo?sslpassword={SECRET}",
    f"postgresql://evo:{SECRET}@h/evo",
    f"mysql+pymysql://evo:{SECRET}@h/evo",
]
OTHERS = [
    *("postgresql://evo@h/evo", "mysql+pymysql://evo@h/evo", f"evo:{SECRET}@h/evo"),
    *(f"password={SECRET}", "postgresql+psycopg://evo@h", "postgresql+psycopg://evo@h/"),
    *("postgresql+psycopg://evo@h/evo#x", "postgresql+psycopg://evo@h/{SCHEMA_VERSION}"),
    *("sqlite://", "sqlite:///:memory:", "sqlite:///file:x?mode=ro", [f"x:{SECRET}"]),
    *("sqllite", 5432),
]


@pytest.mark.parametrize("storage", GOOD)
def test_a_storage_stays_as_it_is_and_comes_back_from_a_file(storage, tmp_path):
    config = from_dict({**MINIMAL, "record": {"storage": storage}})
    assert config.record.storage == storage
    (tmp_path / "population.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "population.yaml") == config


@pytest.mark.parametrize("storage", GOOD[4:])
def test_a_good_url_has_no_password_for_sqlalchemy_either(storage):
    """Its parser is the one that counts: what it took for a password would be one."""
    from sqlalchemy import make_url

    parsed = make_url(storage)
    assert parsed.password is None
    assert parsed.database == "evo"
    assert not {"password", "sslpassword"} & set(parsed.query)


@pytest.mark.parametrize("storage", WITH_PASSWORD)
def test_a_password_is_refused_and_not_repeated(storage, tmp_path):
    file = tmp_path / "population.yaml"
    file.write_text(f"model: tiny-sums\nenv: sums\nrecord:\n  storage: {storage!r}\n")
    for call in (
        lambda: load(file),
        lambda: from_dict(MINIMAL, [f"record.storage={storage}"]),
        lambda: RecordConfig(storage=storage),
    ):
        with pytest.raises(ConfigError, match=r"storage: .*without a password.*PGPASS") as caught:
            call()
        assert SECRET not in str(caught.value)
        # Nor in a traceback, as --debug prints it.
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


@pytest.mark.parametrize("storage", OTHERS)
def test_what_is_no_storage_is_refused_and_nothing_secret_is_shown(storage):
    plain = {"sqllite": "the string 'sqllite'", 5432: "5432"}
    got = "what may hold" if isinstance(storage, list) else plain.get(storage, "what may hold")
    with pytest.raises(ConfigError, match=rf"sqlite:///PATH.* got {got}") as caught:
        RecordConfig(storage=storage)
    assert SECRET not in str(caught.value)


def test_python_takes_it_where_a_run_is_recorded():
    population = GRPO.population(size=2, model="tiny-sums")
    with pytest.raises(ConfigError, match=r"^storage: expected out= too"):
        population.train("sums", storage="sqlite", progress=False)
    with pytest.raises(ConfigError, match=r"^storage: .*without a password") as caught:
        population.train("sums", storage=WITH_PASSWORD[0], out="never-made", progress=False)
    assert SECRET not in str(caught.value)


def test_trackers_may_be_given_by_their_kinds_alone():
    assert RecordConfig(trackers="wandb").trackers == [TrackerConfig(kind="wandb")]
    assert RecordConfig(trackers=None).trackers == []


def test_a_missing_driver_is_named_with_what_to_install(monkeypatch):
    storages.check_driver(GOOD[4])
    monkeypatch.setattr(storages, "find_spec", lambda name: None)
    with pytest.raises(EngineUnavailable, match=r'psycopg.*pip install "evo-grpo\[postgres\]"'):
        storages.check_driver(GOOD[4])
    for other in GOOD[:4]:
        storages.check_driver(other)
