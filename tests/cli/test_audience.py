"""Whom a run is shown to: a person, a program that reads events, or nobody before its end."""

import json
import re
import sys
from pathlib import Path

import pytest
from commands import evo
from shown_run import SUMMARY, run_folder, small_config

from evo_grpo.cli.output import warn, wrapped
from evo_grpo.errors import RunFailedError
from evo_grpo.settings import to_yaml


@pytest.fixture(autouse=True)
def _configuration():
    Path("a.yaml").write_text(to_yaml(small_config()))


def events(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


# --- quiet ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--quiet", "-q"])
def test_quiet_prints_the_run_folder_alone(loop, option):
    result = evo("run", "a.yaml", "-o", "here", option)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "here\n", "")
    again = evo("resume", "here", option, "--compare")
    assert (again.exit_code, again.stdout, again.stderr) == (0, "here\n", "")


def test_quiet_prints_errors_and_no_warnings(loop):
    loop.error, loop.after = RunFailedError("no agent is left"), 1
    warned = ["--set", "evolve.hyperparameters={}"]
    result = evo("run", "a.yaml", "--out", "here", "--quiet", *warned)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: no agent is left\nfix the cause, then continue with: ")
    assert "warning" not in result.stderr


# --- events --------------------------------------------------------------------------------------


def test_json_is_one_event_per_line(loop):
    result = evo("run", "a.yaml", "--out", "here", "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    told = events(result)
    assert [one["event"] for one in told] == [
        *("loading", "started", "stage", "stage", "round", "stage", "stage", "round", "stage"),
        "finished",
    ]
    loading, started, stage, _, first, *_, finished = told
    assert loading == {"event": "loading", "run": None, "what": "tiny-sums"}
    assert started == {"event": "started", "run": "here", "rounds": 2, "first_round": 0}
    assert stage == {
        **{"event": "stage", "run": "here", "round": 0},
        **{"name": "learn", "done": 0, "total": 4},
    }
    assert (first["round"], first["tokens"], first["seconds"]) == (0, 2000, 3.0)
    agent = first["agents"][0]
    assert (agent["agent"], agent["fitness"], agent["hparams"]["lr"]) == (0, 0.5, 1e-3)
    assert agent["reward"] == 0.4
    assert agent["entropy"] is None  # it was not measured
    assert finished["summary"] == SUMMARY
    assert finished["story"][0]["kind"] == "result"
    assert finished["warnings"] == []


def test_json_tells_a_comparison(loop):
    run_folder("here")
    told = events(evo("resume", "here", "--json", "--compare"))
    names = [(one["event"], one["run"]) for one in told]
    assert names[-4:] == [
        ("finished", "here"),
        ("started", "here/compare/guess"),
        ("finished", "here/compare/guess"),
        ("comparison", "here"),
    ]
    assert [arm["name"] for arm in told[-1]["arms"]] == ["guess", "random", "evolved"]


def test_json_tells_warnings_errors_and_stops(loop):
    loop.error, loop.after = RunFailedError("no agent is left"), 1
    warned = ["--set", "evolve.hyperparameters={}"]
    result = evo("run", "a.yaml", "--out", "here", "--json", *warned)
    assert result.exit_code == 1
    told = events(result)
    assert told[0]["event"] == "warning"
    assert told[0]["text"].startswith("evolve.hyperparameters is empty")
    assert told[-1] == {
        **{"event": "error", "run": "here", "type": "RunFailedError", "code": 1},
        "text": "no agent is left\nfix the cause, then continue with: evo-grpo resume here",
    }
    loop.error = KeyboardInterrupt()
    result = evo("run", "a.yaml", "--out", "there", "--json")
    assert result.exit_code == 130
    assert events(result)[-1] == {
        **{"event": "stopped", "run": "there"},
        "text": "stopped after round 1; continue with: evo-grpo resume there",
    }


def test_json_tells_bad_input(loop):
    result = evo("run", "none.yaml", "--json")
    assert result.exit_code == 2
    (told,) = events(result)
    assert (told["event"], told["code"]) == ("error", 2)
    assert told["text"].startswith("none.yaml: no such file")


# --- terminals -----------------------------------------------------------------------------------


COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")


@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_warnings_wrap_between_words_and_have_a_colour_where_one_is_wanted(
    environment, coloured, monkeypatch, capsys
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", **environment}.items():
        monkeypatch.setenv(name, value)
    warn("word " * 40)
    shown = capsys.readouterr().err
    assert bool(COLOUR.search(shown)) == coloured
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert lines[0].startswith("warning: word")
    assert 40 < max(map(len, lines)) <= 80
    assert len(lines) == 3


def test_a_line_of_a_pipe_is_never_broken(monkeypatch, capsys):
    text = "word " * 60
    assert wrapped(text) == text  # nothing here is a terminal
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = wrapped("a /path/that/is-longer/than-twenty/columns and words").splitlines()
    assert lines == ["a", "/path/that/is-longer/than-twenty/columns", "and words"]
