"""`evo-grpo dashboard`, asked through the HTTP interface that its pages use."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from small_run import Told, small
from typer.testing import CliRunner

from evo_grpo import resume, run
from evo_grpo.analysis.verify import verify
from evo_grpo.cli.commands import app
from evo_grpo.readers.dashboard import StudyCopy, trial_note
from evo_grpo.readers.report.figures.lineage import plot_lineage
from evo_grpo.record.folder import read_rounds

SECONDS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return run(small(), out=tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(params=[{}, {"storage": "sqlite"}, {"optuna": False}], ids=str)
def folder_of_any_study(request, tmp_path):
    return run(small(record=request.param), out=tmp_path / "run")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Dashboard:
    """The command in a process of its own."""

    def __init__(self, folder, *options):
        pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed")
        command = [sys.executable, "-m", "evo_grpo", "dashboard", str(folder), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "200"},
        )

    def __enter__(self):
        line = self.process.stdout.readline()
        found = re.search(r"(http://127\.0\.0\.1:\d+)/dashboard\?token=\S+", line)
        assert found, line + self.process.stderr.read()
        self.url = found[1]
        # As a browser does: it is given a cookie, and led to the address without the token.
        self.browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with self.browser.open(found[0], timeout=SECONDS) as answer:
            assert answer.url == f"{self.url}/dashboard"
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.communicate(timeout=SECONDS)

    def get(self, path):
        with self.browser.open(self.url + path, timeout=SECONDS) as answer:
            return answer.read()

    def refused(self, path, *, method="GET", opener=None, **headers):
        """What is said to a request that is refused."""
        request = urllib.request.Request(self.url + path, headers=headers, method=method)
        with pytest.raises(urllib.error.HTTPError) as caught:
            (opener or self.browser).open(request, timeout=SECONDS)
        assert caught.value.code == 403
        return caught.value.read().decode()

    def study(self):
        (one,) = json.loads(self.get("/api/studies"))["study_summaries"]
        return one, json.loads(self.get(f"/api/studies/{one['study_id']}"))


@pytest.mark.slow
def test_it_shows_trials_notes_and_the_family_tree_and_leaves_the_run_alone(folder_of_any_study):
    folder = folder_of_any_study
    before, rounds = contents(folder), read_rounds(folder)
    with Dashboard(folder) as dashboard:
        assert b"<title>Optuna Dashboard</title>" in dashboard.get("/dashboard")
        one, study = dashboard.study()
        assert one["study_name"] == "run"
        agents = [(agent, record) for record in rounds for agent in record.agents]
        trials = study["trials"]
        assert [trial["values"][0] for trial in trials] == [a.score.mean for a, _ in agents]
        for trial, (agent, record) in zip(trials, agents, strict=True):
            assert trial["note"]["body"] == trial_note(agent, record)
            name = f"**Agent {agent.agent} in round {record.round + 1}**, member {agent.member}"
            assert trial["note"]["body"].startswith(name)
        assert "tiny-sums" in study["note"]["body"]
        assert str(folder) in study["note"]["body"]
        (figure,) = study["plotly_graph_objects"]
        assert figure["id"] == "lineage"
        drawn = json.loads(figure["graph_object"])
        tree = json.loads(plot_lineage(folder).to_json())
        assert drawn["data"] == tree["data"]
        assert drawn["layout"]["title"]["text"] == "Family tree"
        assert study["objective_names"] == ["fitness"]
        # A button of the dashboard, which would be damage in the study of the run.
        request = urllib.request.Request(
            f"{dashboard.url}/api/studies/{one['study_id']}", method="DELETE"
        )
        dashboard.browser.open(request, timeout=SECONDS).close()
        assert json.loads(dashboard.get("/api/studies"))["study_summaries"] == []
    assert contents(folder) == before
    assert verify(folder).damage == []


@pytest.mark.slow
def test_it_answers_on_this_machine_alone(folder):
    with Dashboard(folder) as dashboard:
        port = int(dashboard.url.rpartition(":")[2])
        listening = Path(f"/proc/{dashboard.process.pid}/net/tcp").read_text().splitlines()
        rows = [line.split() for line in listening]
        listens = "0A"  # others are connections that ended just now
        mine = [row[1] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == listens]
        assert set(mine) == {f"0100007F:{port:04X}"}


def test_neither_another_page_nor_another_user_is_answered(folder):
    with Dashboard(folder) as dashboard:
        port, stranger = dashboard.url.rpartition(":")[2], urllib.request.build_opener()
        one, _ = dashboard.study()
        study, delete = f"/api/studies/{one['study_id']}", {"method": "DELETE"}
        for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", ""):
            assert "expected the host" in dashboard.refused(study, Host=host, **delete)
        for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
            assert "another origin" in dashboard.refused(study, Origin=origin, **delete)
        for path in ("/dashboard", study, f"{study}?token=guessed"):
            assert "the whole address" in dashboard.refused(path, opener=stranger)
        assert "the whole" in dashboard.refused(study, opener=stranger, Cookie="evo-grpo-1=x; =")
        assert "the whole" in dashboard.refused(study, opener=stranger, **delete)
        assert len(dashboard.study()[1]["trials"]) == 9
        # What a page of its own sends.
        request = urllib.request.Request(dashboard.url + study, headers={"Origin": dashboard.url})
        dashboard.browser.open(request, timeout=SECONDS).close()


@pytest.mark.slow
def test_rounds_that_are_finished_meanwhile_are_shown(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(small(), out=tmp_path / "run", observer=Told(("learn", 1)))
    with Dashboard(tmp_path / "run") as dashboard:
        assert len(dashboard.study()[1]["trials"]) == 3
        resume(tmp_path / "run")
        until = time.monotonic() + SECONDS
        _, study = dashboard.study()
        # The dashboard caches trials; the note about the winner is written last.
        while len(study["trials"]) < 9 or "The winner is" not in study["note"]["body"]:
            assert time.monotonic() < until
            time.sleep(0.2)
            _, study = dashboard.study()
        # This answer may hold the figure from before the note.
        _, study = dashboard.study()
        assert len(study["trials"]) == 9
        assert all(trial["note"]["body"] for trial in study["trials"])
        (figure,) = study["plotly_graph_objects"]
        whole = json.loads(plot_lineage(tmp_path / "run").to_json())
        assert json.loads(figure["graph_object"])["data"] == whole["data"]
    assert verify(tmp_path / "run").damage == []


def test_a_port_that_is_taken_is_named(folder):
    pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(app, ["dashboard", str(folder), "--port", port])
    assert done.exit_code == 2 or done.exception is not None
    assert f"--port {port}: cannot be used on 127.0.0.1" in str(done.exception) + done.output


def test_a_missing_package_is_named_with_its_remedy(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    with pytest.raises(ImportError, match=r"optuna_dashboard cannot .*evo-grpo\[dashboard\]"):
        StudyCopy(folder)
