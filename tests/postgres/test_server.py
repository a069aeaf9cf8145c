"""Trials on a real PostgreSQL server: it goes and comes back, runs share it, nothing is lost.

The server belongs to these tests: a folder, a port and a password of its own. `make test-postgres`
runs them; where no server is installed they fail.
"""

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import optuna
import pytest
from postgres import PASSWORD, Server
from random_runs import HP_CONFIG, make_run, timed
from ranks import finish, free_port, start
from small_run import SETTINGS, Told, outcome, small

from evo_grpo.errors import ConfigError
from evo_grpo.inputs import read_inputs_of
from evo_grpo.record import delivery
from evo_grpo.record.database import Unreachable, check_url, open_url
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.lineage import Lineage
from evo_grpo.settings import load
from evo_grpo.studies import deliver, study_of
from evo_grpo.training import resume, run
from evo_grpo.verifying.verify import verify

pytestmark = pytest.mark.postgres


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
def plain(tmp_path_factory):
    """A run that keeps its trials in the journal."""
    return run(small(population__rounds=4), out=tmp_path_factory.mktemp("plain") / "run")


def whole(folder, url):
    """Whether the study of a run has each trial as recorded, and no other."""
    rounds, config = read_rounds(folder), load(folder / "population.yaml")
    with open_url(url, f"{config.name}-{read_inputs_of(folder).id}", {}) as study:
        lineage = Lineage(study, hp_config=config.agents().search_space())
        trials = lineage.trials()
        assert [trial.number for trial in trials] == list(range(len(trials)))
        assert lineage.differing(rounds) == []
    return len(trials) == sum(len(record.agents) for record in rounds)


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


def same_but_for_the_study(one, other):
    first, second = outcome(one), outcome(other)
    first["files"], second["files"] = (
        set(o.pop("files")) - {"journal.log"} for o in (first, second)
    )
    return first == second


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


class AtRounds(Told):
    """Does something once a round is done."""

    def __init__(self, **what):
        super().__init__()
        self.what = {int(name.removeprefix("after_")): do for name, do in what.items()}

    def round_done(self, record):
        super().round_done(record)
        if record.round in self.what:
            self.what[record.round]()


def test_a_run_with_a_server_is_the_run_with_a_journal(plain, tmp_path, url):
    folder = run(small(record__storage=url, population__rounds=4), out=tmp_path / "run")
    assert whole(folder, url)
    assert same_but_for_the_study(plain, folder)
    assert verify(folder).damage == verify(folder).notes == []
    name, where = study_of(folder)
    with as_optuna_reads(where) as storage:
        loaded = optuna.load_study(study_name=name, storage=storage)
        assert loaded.user_attrs["run_id"] == read_inputs_of(folder).id
        assert loaded.metric_names == ["fitness"]
        trials = loaded.trials
    rounds = read_rounds(folder)
    for trial in trials:
        record = rounds[trial.user_attrs["round"]]
        assert trial.datetime_start.timestamp() == pytest.approx(record.started, abs=1e-5)
        assert trial.datetime_complete.timestamp() == pytest.approx(record.ended, abs=1e-5)
        assert list(trial.intermediate_values) == [record.round]


def test_two_runs_that_begin_at_once_on_an_empty_database_lose_and_mix_nothing(tmp_path, url):
    """Of one name, in two processes: they even make the tables at the same time."""
    changes, env = slow(tmp_path)
    processes = []
    for name, seed in (("one", 1), ("two", 2)):
        file = file_of(tmp_path / name, seed=seed, record={"storage": url}, **changes)
        (process,) = start(1, *evo("run", file, "--out", tmp_path / name / "run"),
                           env={**env, "WORLD_SIZE": "1"})  # fmt: skip
        processes.append(process)
    for out, said, code in finish(processes):
        assert code == 0, out + said
        assert "cannot be reached" not in said
    folders = [tmp_path / "one" / "run", tmp_path / "two" / "run"]
    assert all(whole(folder, url) for folder in folders)
    assert study_names(url) == sorted(study_of(f)[0] for f in folders)
    digests = [{a.adapter_sha256 for r in read_rounds(f) for a in r.agents} for f in folders]
    assert not digests[0] & digests[1]


def test_tables_that_many_make_at_once_are_made_once(server, monkeypatch):
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    for _ in range(3):
        server.create(name := f"test-{uuid4().hex}")
        url, together = server.url_of(name), threading.Barrier(6)

        def begin(url=url, together=together):
            together.wait()
            check_url(url)

        with ThreadPoolExecutor(6) as threads:
            for one in [threads.submit(begin) for _ in range(6)]:
                one.result()
        assert study_names(url) == []


@pytest.mark.parametrize("how", ["fast", "immediate"])
def test_a_server_that_stops_and_starts_in_the_middle_of_a_run_has_everything(
    plain, tmp_path, server, url, how
):
    warned = []
    observer = AtRounds(after_0=lambda: server.stop(how), after_2=server.start)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest: warned.append(str(message))
        folder = run(
            small(record__storage=url, population__rounds=4),
            out=tmp_path / "run",
            observer=observer,
        )
    assert whole(folder, url)
    assert same_but_for_the_study(plain, folder)
    assert len([text for text in warned if "cannot be reached" in text]) <= 1
    assert not [text for text in warned if "not all trials" in text]


def test_a_server_that_is_gone_at_the_end_gets_the_rest_by_deliver(
    plain, tmp_path, server, url, monkeypatch, capsys
):
    monkeypatch.setattr(delivery, "SECONDS_WITHOUT_TRIAL", 1.0)
    observer = AtRounds(after_1=lambda: server.stop("immediate"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = run(
            small(record__storage=url, population__rounds=4),
            out=tmp_path / "run",
            observer=observer,
        )
    assert same_but_for_the_study(plain, folder)
    texts = [str(one.message) for one in caught if one.category is UserWarning]
    assert texts[-1].endswith(f"deliver the rest with: evo-grpo deliver {folder}")
    with pytest.raises(ConfigError, match=r"cannot be used: .*[Cc]onnection.*start the server"):
        deliver(folder)
    server.start()
    # By the command, as the run said.
    done = subprocess.run(
        [sys.executable, *evo("deliver", str(folder))], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "trials delivered; study small-" in done.stdout
    assert whole(folder, url)
    assert [one.added for one in deliver(folder)] == [0]


def test_a_run_that_is_killed_while_it_delivers_goes_on_without_a_gap(tmp_path, url):
    changes, env = slow(tmp_path)
    file, folder = file_of(tmp_path / "run", record={"storage": url}, **changes), tmp_path / "out"
    for lines in (1, 2, 3):
        do = ("resume", folder) if folder.exists() else ("run", file, "--out", folder)
        (process,) = start(1, *evo(*do), env={**env, "WORLD_SIZE": "1"})
        until = time.monotonic() + 60
        rounds = folder / "rounds.jsonl"
        while not (rounds.is_file() and rounds.read_text().count("\n") >= lines):
            assert time.monotonic() < until
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        time.sleep(0.05 * lines)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    (process,) = start(1, *evo("resume", folder), env={**env, "WORLD_SIZE": "1"})
    ((out, said, code),) = finish([process])
    assert code == 0, out + said
    assert whole(folder, url)


def test_two_copies_of_a_run_that_go_on_at_once_add_each_trial_once(tmp_path, url):
    changes, env = slow(tmp_path, rounds=4)
    file = file_of(tmp_path / "run", record={"storage": url}, **changes)
    (process,) = start(1, *evo("run", file, "--out", tmp_path / "one", "--set",
                               "population.rounds=1"), env={**env, "WORLD_SIZE": "1"})  # fmt: skip
    ((out, said, code),) = finish([process])
    assert code == 0, out + said
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    both = [tmp_path / "one", tmp_path / "two"]
    processes = [
        start(1, *evo("resume", folder, "--rounds", 4), env={**env, "WORLD_SIZE": "1"})[0]
        for folder in both
    ]
    for out, said, code in finish(processes):
        assert code == 0, out + said
    assert same_but_for_the_study(*both)
    assert len(study_names(url)) == 1
    assert all(whole(folder, url) for folder in both)


def test_ranks_have_the_first_one_deliver(tmp_path, url):
    engine = {"device": "cpu", "threads": 1, "shards": 2}
    file = file_of(tmp_path / "run", engine=engine, record={"storage": url})
    for out, said, code in finish(start(2, *evo("run", file, "--out", tmp_path / "out"))):
        assert code == 0, out + said
    assert whole(tmp_path / "out", url)


class Proxy:
    """Stands between a run and the server, and breaks connections right behind a trial's commit.

    Args:
        port: Of the server.
        breaks: Numbers of the trials whose writer never hears that they are there, from 1.
    """

    def __init__(self, port, breaks):
        self.server, self.breaks, self.trials = port, set(breaks), 0
        self.lock, self.broken = threading.Lock(), 0
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self.listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        server = socket.create_connection(("127.0.0.1", self.server))
        threading.Thread(target=self._back, args=(server, client), daemon=True).start()
        wrote = False
        while data := self._read(client):
            wrote = wrote or b"INSERT INTO trials " in data
            cut = False
            if b"COMMIT" in data and wrote:
                wrote = False
                with self.lock:
                    self.trials += 1
                    cut = self.trials in self.breaks
            if cut:
                # The answer stays here; the server has committed once it gave one.
                with self.lock:
                    self.broken += 1
                self.silent = server
                server.sendall(data)
                time.sleep(0.2)
                break
            server.sendall(data)
        for one in (client, server):
            one.close()

    def _back(self, server, client):
        while data := self._read(server):
            if getattr(self, "silent", None) is server:
                continue
            try:
                client.sendall(data)
            except OSError:
                return

    @staticmethod
    def _read(one):
        try:
            return one.recv(65536)
        except OSError:
            return b""

    def close(self):
        self.listening.close()


def test_a_trial_whose_commit_is_never_confirmed_is_there_once(server, url, monkeypatch):
    """Optuna would add it again: it cannot know that the server has it."""
    records = timed(make_run(size=3, rounds=4))
    open_url(url, "run-1", {}).close()
    proxy = Proxy(server.port, breaks=range(2, 12, 3))
    through = url.replace(f":{server.port}/", f":{proxy.port}/")
    seen = 0
    while seen < len(records):
        try:
            with open_url(through, "run-1", {}) as study:
                lineage = Lineage(study, hp_config=HP_CONFIG)
                for record in records[:seen]:
                    lineage.record(record)
                for record in records[seen:]:
                    lineage.record(record)
                    seen += 1
        except Unreachable:
            pass
    proxy.close()
    assert proxy.broken == 4
    with open_url(url, "run-1", {}) as study:
        lineage = Lineage(study, hp_config=HP_CONFIG)
        assert len(lineage.trials()) == 12
        assert lineage.differing(records) == []


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


def test_a_server_without_a_locale_will_do(tmp_path, server, monkeypatch):
    """Such a database says nothing of the encoding of its strings."""
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    server.create("ascii", "-E", "SQL_ASCII", "-T", "template0")
    url = server.url_of("ascii")
    folder = run(small(record__storage=url, population__rounds=1), out=tmp_path / "run")
    assert whole(folder, url)


def test_the_password_is_nowhere(tmp_path, server, url):
    """Neither in the run folder, nor in the output, nor in a log that hears of everything."""
    changes, env = slow(tmp_path, rounds=2)
    (tmp_path / "told.py").write_text(
        "import logging, sys\n"
        f"logging.basicConfig(filename={str(tmp_path / 'log')!r}, level=logging.DEBUG)\n"
        "from evo_grpo.cli import main\nsys.exit(main())\n"
    )
    file = file_of(tmp_path / "run", record={"storage": url}, **changes)
    said = ""
    commands = [("run", file, "--out", tmp_path / "out", "--debug"), ("deliver", tmp_path / "out"),
                ("verify", tmp_path / "out"), ("resume", tmp_path / "out")]  # fmt: skip
    for command in commands:
        done = subprocess.run(
            [sys.executable, str(tmp_path / "told.py"), *map(str, command)], cwd=tmp_path,
            env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said += done.stdout + done.stderr
    server.stop()
    # A command that fails, with its traceback.
    done = subprocess.run(
        [sys.executable, str(tmp_path / "told.py"), "deliver", str(tmp_path / "out"), "--debug"],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    said += done.stdout + done.stderr
    server.start()
    assert "sqlalchemy" in (tmp_path / "log").read_text() or "evo_grpo" in said
    assert PASSWORD not in said
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert PASSWORD.encode() not in path.read_bytes(), path
    # It was needed: the server asked for it.
    assert whole(tmp_path / "out", url)


def test_a_password_in_the_url_is_refused_and_repeated_nowhere(tmp_path, url):
    secret = url.replace("evo@", f"evo:{PASSWORD}@")
    file = file_of(tmp_path / "run")
    for command in ("check", "run"):
        given = evo(command, str(file), "--set", f"record.storage={secret}", "--debug")
        done = subprocess.run(
            [sys.executable, *given], cwd=tmp_path, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert "without a password" in done.stderr
        assert PASSWORD not in done.stdout + done.stderr
    assert not list(Path(tmp_path).glob("runs*"))


def test_nothing_is_said_of_the_server_while_all_is_well(tmp_path, url, caplog):
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        run(small(record__storage=url, population__rounds=1), out=tmp_path / "run")
    assert caplog.text == ""
    assert resume(tmp_path / "run") == tmp_path / "run"
