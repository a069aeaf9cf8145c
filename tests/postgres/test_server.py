"""Trials on a real PostgreSQL server: it goes and comes back, runs share it, nothing is lost.

The server belongs to these tests: a folder, a port and a password of its own. `make test-postgres`
runs them; where no server is installed they fail.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import optuna
import pytest
from fed_studies import expected, reader_of, said, send
from ranks import free_port
from small_run import SETTINGS, Told, small

from evo_grpo import resume, run, study_of
from evo_grpo.errors import ConfigError
from evo_grpo.record.database import DatabaseError
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.log import RoundDone
from evo_grpo.settings import load
from evo_grpo.training.recorded_inputs import read_inputs_of

pytestmark = pytest.mark.postgres

PASSWORD = "not-to-be-found-4711"
USER = DATABASE = "evo"


def _binaries():
    """Return the folder of the server's programs; fails where there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    if not found and on_path is None:
        raise AssertionError(
            "expected a PostgreSQL server to test against, found none; install it: "
            "apt-get install postgresql"
        )
    return found[-1].parent if found else Path(on_path).parent


class Server:
    """A real server on the loopback, in a folder of its own; use it as a context manager.

    From Debian's package `postgresql`. It refuses to run as root, so root starts it as the user
    postgres.
    """

    def __enter__(self):
        self._bin = _binaries()
        self._as = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        secret = self._folder / "password"
        secret.write_text(PASSWORD)
        if self._as:
            shutil.chown(self._folder, "postgres")
            shutil.chown(secret, "postgres")
        self.port = free_port()
        self._run(
            *("initdb", "-D", self._data, "-U", USER, "-A", "scram-sha-256", "-N"),
            *(f"--pwfile={secret}", "-E", "UTF8", "--locale=C"),
        )
        self.start()
        self.create(DATABASE)
        return self

    def __exit__(self, *error):
        self.stop()
        shutil.rmtree(self._folder)

    @property
    def _data(self):
        return self._folder / "data"

    def url_of(self, database):
        return f"postgresql+psycopg://{USER}@127.0.0.1:{self.port}/{database}"

    def start(self):
        options = (
            f"-p {self.port} -c listen_addresses=127.0.0.1 -c fsync=off "
            f"-c unix_socket_directories={self._folder}"
        )
        self._run("pg_ctl", "-D", self._data, "-l", self._log, "-w", "-o", options, "start")

    def start_if_stopped(self):
        """A test that failed may have left it so."""
        if not (self._data / "postmaster.pid").exists():
            self.start()

    def stop(self, how="fast"):
        """Stop; `immediate` as if the machine lost power."""
        self._run("pg_ctl", "-D", self._data, "-m", how, "-w", "stop", check=False)

    def create(self, database, *options):
        """Make another database."""
        self._run("createdb", *self._as_user, *options, database)

    def sql(self, statement):
        self._run("psql", *self._as_user, "-d", DATABASE, "-c", statement)

    @property
    def _as_user(self):
        return ("-h", "127.0.0.1", "-p", self.port, "-U", USER)

    @property
    def _log(self):
        return self._folder / "log"

    def _run(self, program, *arguments, check=True):
        done = subprocess.run(
            [*self._as, str(self._bin / program), *map(str, arguments)],
            cwd=self._folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
            env={**os.environ, "PGPASSWORD": PASSWORD, "LC_ALL": "C"},
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{program}: {done.stdout}"


FOLLOW = (
    "import sys; from pathlib import Path; from evo_grpo.readers.reader import feed; "
    "from evo_grpo.record.study import StudyReader as R; run = Path(sys.argv[1]); "
    "from evo_grpo.training.recorded_inputs import read_inputs_of; "
    "known = read_inputs_of(run).id; url = sys.argv[2]; "
    "feed(run, 'optuna', lambda id: R(run, known, url, id), from_start=True, follow=True)"
)
"""What `evo-grpo follow` does in a process of its own."""


@pytest.fixture(scope="module")
def server():
    with Server() as one:
        yield one


@pytest.fixture
def url(server, monkeypatch):
    """An empty database for each test; its password is in the environment alone."""
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    name = f"test-{uuid4().hex}"
    server.start_if_stopped()
    server.create(name)
    return server.url_of(name)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of four rounds, which no database knows."""
    return run(small(population__rounds=4), out=tmp_path_factory.mktemp("made") / "run")


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def whole(folder, url):
    """Whether the study of a run has each trial as recorded, and no other."""
    config = load(folder / "population.yaml")
    name = f"{config.name}-{read_inputs_of(folder).id}"
    with as_optuna_reads(url) as storage:
        trials = optuna.load_study(study_name=name, storage=storage).trials
    return list(map(said, trials)) == expected(read_rounds(folder), config.search_space())


@contextmanager
def as_optuna_reads(url):
    """The database as Optuna's own tools open it; they leave it to Python to close it."""
    storage = optuna.storages.RDBStorage(url)
    try:
        yield storage
    finally:
        storage.engine.dispose()


def study_names(url):
    with as_optuna_reads(url) as storage:
        return sorted(study.study_name for study in storage.get_all_studies())


def file_of(folder, **changes):
    """A run file of JSON, which is YAML."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "population.yaml"
    path.write_text(json.dumps({**SETTINGS, **changes}))
    return path


def evo(*arguments):
    return ("-m", "evo_grpo", *arguments)


def slow(folder, rounds=4):
    """Settings of a run whose rewards take their time, and the environment to find them in."""
    (folder / "my_reward.py").write_text(
        "import time\n\ndef score(completions, answer, **_):\n    time.sleep(0.1)\n"
        "    return [float(str(a) in c) for c, a in zip(completions, answer, strict=True)]\n"
    )
    changes = {
        "env": {"kind": "sums", "args": {"high": 20}, "reward": "my_reward:score"},
        "population": {**SETTINGS["population"], "rounds": rounds},
    }
    return changes, {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}


def test_a_server_has_the_trials_of_a_run_once_however_often_it_is_fed(folder, url):
    for _ in range(2):
        send(folder, url)
        assert whole(folder, url)
    (name,) = study_names(url)
    with as_optuna_reads(url) as storage:
        study = optuna.load_study(study_name=name, storage=storage)
        assert study.user_attrs["run_id"] == read_inputs_of(folder).id
        assert study.metric_names == ["fitness"]


def test_two_runs_that_are_followed_at_once_into_an_empty_database_lose_and_mix_nothing(
    tmp_path, url
):
    """Of one name, each in its process, while both train: they even make the tables at once."""
    changes, env = slow(tmp_path)
    folders, processes = [], []
    for name, seed in (("one", 1), ("two", 2)):
        file = file_of(tmp_path / name, seed=seed, record={"storage": url}, **changes)
        folders.append(tmp_path / name / "run")
        processes.append(begun(*evo("run", file, "--out", folders[-1]), env=env))
    for folder in folders:
        until = time.monotonic() + 60
        while not (folder / "inputs.json").is_file():
            assert time.monotonic() < until
            time.sleep(0.01)
        processes.append(begun("-c", FOLLOW, folder, url, env=env))
    for process in processes:
        out, said_there = process.communicate(timeout=120)
        assert process.returncode == 0, out + said_there
    for folder in folders:
        send(folder, url)
    assert all(whole(folder, url) for folder in folders)
    assert study_names(url) == sorted(study_of(f)[0] for f in folders)


def begun(*arguments, env):
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], env={**os.environ, **env}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize("how", ["fast", "immediate"])
def test_a_server_that_stops_in_the_middle_has_everything_once_it_is_back(folder, server, url, how):
    reader = reader_of(folder, url)
    rounds = read_rounds(folder)
    for record in rounds[:2]:
        reader.read(RoundDone(record.round + 1, record))
    server.stop(how)
    with pytest.raises(DatabaseError) as caught:
        reader.read(RoundDone(3, rounds[2]))
    assert "\n" not in str(caught.value)
    with pytest.raises(DatabaseError, match=r"[Cc]onnection"):
        send(folder, url)
    server.start()
    send(folder, url)
    assert whole(folder, url)


def test_a_run_trains_on_while_the_server_is_gone(tmp_path, server, url):
    with pytest.raises(KeyboardInterrupt):
        run(small(record__storage=url), out=tmp_path / "run", observer=Told(("learn", 1)))
    server.stop("immediate")
    # A run that takes longer hears of the first try, too.
    with pytest.warns(UserWarning, match="continue with: evo-grpo follow|retrying") as told:
        resume(tmp_path / "run")
    assert any("evo-grpo follow" in str(one.message) for one in told)
    server.start()
    send(tmp_path / "run", url)
    assert whole(tmp_path / "run", url)


def test_one_that_is_killed_at_any_instant_leaves_no_gap_and_no_second_trial(folder, url):
    for milliseconds in range(0, 200, 20):
        process = begun("-c", FOLLOW, folder, url, env={})
        until = time.monotonic() + 60
        while not study_names(url):
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(milliseconds / 1000)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    send(folder, url)
    assert whole(folder, url)


@pytest.mark.parametrize("wrong", ["port", "password", "database", "user", "permission"])
def test_a_server_that_cannot_be_used_is_named_before_there_is_a_folder(
    tmp_path, server, url, monkeypatch, wrong
):
    expected = {
        "port": "Connection refused",
        "password": "password authentication failed",
        "database": "does not exist",
        "user": "password authentication failed",
        "permission": "permission denied",
    }[wrong]
    if wrong == "port":
        url = url.replace(f":{server.port}/", f":{free_port()}/")
    elif wrong == "password":
        monkeypatch.setenv("PGPASSWORD", f"{PASSWORD}-wrong")
    elif wrong == "database":
        url = server.url_of("no-such-database")
    elif wrong == "user":
        url = url.replace("evo@", "nobody@")
    else:
        server.sql("CREATE ROLE guest LOGIN PASSWORD 'guest'")
        monkeypatch.setenv("PGPASSWORD", "guest")
        url = url.replace("evo@", "guest@")
    with pytest.raises(ConfigError, match=expected) as caught:
        run(small(record__storage=url), out=tmp_path / "out")
    text = str(caught.value)
    assert text.startswith(f"record.storage: {url} cannot be used: ")
    assert "the password comes from PGPASSWORD or ~/.pgpass" in text
    assert PASSWORD not in text
    assert not (tmp_path / "out").exists()


def test_a_server_without_a_locale_will_do(folder, server, monkeypatch):
    """Such a database says nothing of the encoding of its strings."""
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    server.create("ascii", "-E", "SQL_ASCII", "-T", "template0")
    send(folder, server.url_of("ascii"))
    assert whole(folder, server.url_of("ascii") + "?client_encoding=utf8")


def test_the_password_is_nowhere(tmp_path, server, url):
    """Neither in the run folder, nor in the output, nor in a log that hears of everything."""
    changes, env = slow(tmp_path, rounds=2)
    log = f"import logging; logging.basicConfig(filename={str(tmp_path / 'log')!r}, level=10)\n"
    (tmp_path / "evo.py").write_text(
        f"{log}import sys\nfrom evo_grpo.cli import main\nsys.exit(main())\n"
    )
    (tmp_path / "follow.py").write_text(log + FOLLOW)
    file = file_of(tmp_path / "run", record={"storage": url}, **changes)
    out, said_there, codes = tmp_path / "out", "", []
    for script, *arguments in (
        ("evo.py", "run", file, "--out", out, "--debug"),
        ("follow.py", out, url),
        ("evo.py", "verify", out),
        ("follow.py", out, url),  # without a server, with its traceback
    ):
        if len(codes) == 3:
            server.stop()
        process = begun(tmp_path / script, *arguments, env=env)
        said_there += "".join(process.communicate(timeout=120))
        codes.append(process.returncode)
    server.start()
    assert codes == [0, 0, 0, 1], said_there
    assert said_there.count("Traceback") > 1
    assert "sqlalchemy" in (tmp_path / "log").read_text() or "evo_grpo" in said_there
    assert PASSWORD not in said_there
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert PASSWORD.encode() not in path.read_bytes(), path
    # It was needed: the server asked for it.
    assert whole(out, url)
