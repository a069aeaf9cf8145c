"""Names, paths, data and messages of others on the screen: escaped, whatever command shows them."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from shown_run import SUMMARY, small_config, two_rounds
from typer.testing import CliRunner, Result

from evo_grpo.cli.commands import app
from evo_grpo.cli.output import write
from evo_grpo.escaping import printable
from evo_grpo.record.files import to_line
from evo_grpo.record.run_dir import RunDir
from evo_grpo.settings import to_yaml

EVIL = "a\x1b[31m\nb\r\u202e[red]:smile:\x9b"
"""A colour, a new line, a line written over, right to left, markup, an emoji and a C1 escape."""
SHOWN = r"a\x1b[31m\nb\r\u202e[red]:smile:\x9b"
QUOTED = json.dumps(EVIL)
"""As YAML and JSON write it."""


def evo(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    for line in (result.stdout + result.stderr).split("\n"):
        assert line == printable(line)
    return result


def config(text: str = "model: tiny-sums\nenv: sums\n", name: str = "population.yaml") -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def table(column: str, value: str) -> None:
    rows = "".join(json.dumps({column: value, "q": f"{n}+1="}) + "\n" for n in range(12))
    Path("rows.jsonl").write_text(rows)


SMALL = """
population: {size: 2, rounds: 1, steps_per_round: 1}
algorithm: {group_size: 2, prompts_per_step: 2, max_output_tokens: 3}
evolve: {fitness: {prompts: 2, test_prompts: 2}}
engine: {device: cpu}
"""
DATASET = "model: tiny-sums\nenv: {kind: dataset, train: rows.jsonl, prompt: '{q}', reward: '%s'}\n"


# --- configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"model: tiny-sums\nenv: sums\nname: {QUOTED}\n",
        f"model: {QUOTED}\nenv: sums\n",
        f"model: tiny-sums\nenv: {QUOTED}\n",
        f"model: tiny-sums\nenv: {{kind: sums, args: {{{QUOTED}: 3}}}}\n",
        f"model: tiny-sums\nenv: {{kind: sums, args: {{high: {QUOTED}}}}}\n",
        f"model: tiny-sums\nenv: {{kind: dataset, train: {QUOTED}, reward: 'foreign_any:score'}}\n",
        f"model: tiny-sums\nenv: sums\n{QUOTED}: 1\n",
        f"model: tiny-sums\nenv: sums\nevolve: {{selection: {QUOTED}}}\n",
        f"model: {{name: tiny-sums, lora: {{target_modules: [{QUOTED}]}}}}\nenv: sums\n",
        "model: tiny-sums\nenv: \x1b[31m\n",  # as it is, which YAML does not allow
    ],
)
def test_a_configuration_that_is_refused(text: str):
    Path("foreign_any.py").write_text("def score(completion):\n    return 1.0\n")
    result = evo("check", config(text))
    assert result.exit_code == 2
    assert "\x1b" not in result.stderr
    assert r"\x1b" in result.stderr or "the character U+001B" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_plan_of_a_model_with_such_a_name():
    Path(EVIL).mkdir()
    (Path(EVIL) / "config.json").write_text(json.dumps({"model_type": EVIL}))
    result = evo("check", config(f"model: {json.dumps('./' + EVIL)}\nenv: sums\n"))
    assert result.exit_code == 0
    assert result.stdout.count(r"\x1b[31m") >= 2
    assert "[red]" in result.stdout


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["check", "run", "resume", "leaderboard", "lineage", "replay"])
def test_a_file_name_that_is_not_there(command: str):
    result = evo(command, EVIL)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {SHOWN}: no ")


def test_the_file_names_of_commands_that_write():
    assert f"wrote {SHOWN}; next: evo-grpo check {SHOWN}" in evo("init", EVIL).stdout
    assert f"{SHOWN} is valid." in evo("check", EVIL).stdout
    assert f"error: {SHOWN}: already exists" in evo("init", EVIL).stderr
    assert f"wrote {SHOWN}.json; name it" in evo("schema", "--out", EVIL + ".json").stdout
    assert f"error: {SHOWN}" in evo("export", EVIL, "--best", "out").stderr


@pytest.mark.parametrize("arguments", [[EVIL], ["run", "a", EVIL], ["run", "--" + EVIL]])
def test_arguments_that_are_none(arguments: list[str]):
    result = evo(*arguments)
    assert result.exit_code == 2
    words = "".join(result.stderr.replace("│", "").split())
    assert r"\x1b[31m" in words
    assert "[red]:smile:" in words


@pytest.mark.slow
def test_a_file_name_that_is_no_text():
    name = b"a\xff\x1b.yaml"
    command = [sys.executable, "-m", "evo_grpo", "check", name]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(rb"error: a\udcff\x1b.yaml: no such file")
    config(name=os.fsdecode(name))
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith(rb"a\udcff\x1b.yaml is valid.")


def test_a_terminal_without_utf_8_gets_escapes():
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(
        [sys.executable, "-m", "evo_grpo", "check", config(name="漢.yaml")],
        capture_output=True,
        check=False,
        env=env,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(rb"\u6f22.yaml is valid.")


# --- data, completions, rewards ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise ValueError(note)", rf"it raised ValueError: {SHOWN}"),
        ("return note", r"got str 'a\x1b[31m\nb\r\u202e[red]:smile:\x9b'"),
        (
            "raise type(note, (Exception,), {})",
            r"it raised a\x1b[31m\nb\r\u202e[red]:smile:\x9b",
        ),
    ],
)
def test_a_reward_function_that_fails_with_a_value_of_its_row(body: str, expected: str):
    table("note", EVIL)
    module = f"foreign_{abs(hash(body))}"
    Path(f"{module}.py").write_text(f"def score(completion, note):\n    {body}\n")
    name = config(DATASET % f"{module}:score" + SMALL)
    result = evo("run", name, "--out", EVIL, "--debug")
    assert result.exit_code == 2
    *trace, error, remedy = result.stderr.splitlines()
    assert trace[0].startswith("Traceback")
    assert error.startswith("error: reward function")
    assert expected in error
    assert remedy == f"fix the cause, then continue with: evo-grpo resume {SHOWN}"


def test_a_column_with_such_a_name():
    table(EVIL, "x")
    Path("foreign_column.py").write_text("def score(completion, missing):\n    return 1.0\n")
    result = evo("check", config(DATASET % "foreign_column:score" + SMALL))
    assert result.exit_code == 2
    assert f"Columns of the row: {SHOWN}, q" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    debug = evo("check", "population.yaml", "--debug").stderr
    assert "Traceback" in debug
    assert debug.count(SHOWN) == 2


@pytest.mark.filterwarnings("default")
def test_the_warnings_of_a_reward_function_and_of_a_run_without_signal():
    table("note", EVIL)
    Path("foreign_warning.py").write_text(
        "import warnings\n"
        "def score(completion, note):\n"
        "    warnings.warn(note)\n"
        "    warnings.warn(note, RuntimeWarning)\n"
        "    return 1.0\n"
    )
    yaml = DATASET % "foreign_warning:score" + SMALL
    name = config(yaml.replace("'{q}'", "'{q}{note}'"))
    with pytest.warns(RuntimeWarning, match=re.escape(SHOWN)):  # not for users: in Python's form
        result = evo("run", name, "--out", "here")
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert r"warning: a\x1b[31m b \u202e[red]:smile:\x9b" in lines
    (told,) = [line for line in lines if "nothing to learn from" in line]
    assert told.startswith("warning: round 1 had")
    assert r"prompt '" in told
    assert SHOWN.partition("[red]")[0] in told


# --- records -------------------------------------------------------------------------------------


def recorded(name: str) -> str:
    """A run folder of that name, whose records hold strings of somebody else's."""
    folder = RunDir.create(Path(name), "one", to_yaml(small_config()))
    with folder:
        for record in two_rounds():
            agents = tuple(
                replace(agent, checkpoint=f"checkpoints/{EVIL}", reason=EVIL, state="ok")
                for agent in record.agents
            )
            folder.append_round(replace(record, agents=agents))
        summary = {**SUMMARY, "split": EVIL, "best": {**SUMMARY["best"], "parents": []}}
        folder.write("summary.json", to_line(summary))
    return name


@pytest.mark.parametrize("arguments", [["leaderboard"], ["leaderboard", "--markdown"]])
def test_a_recorded_checkpoint_path(arguments: list[str]):
    result = evo(*arguments, recorded("one"))
    assert result.exit_code == 0
    assert result.stdout.count(SHOWN) == 2


def test_csv_and_json_hold_the_text_itself():
    name = recorded("one")
    (row, _) = json.loads(evo("leaderboard", "--json", name).stdout)
    assert row["checkpoint"] == f"checkpoints/{EVIL}"
    csv = CliRunner().invoke(app, ["leaderboard", "--csv", name]).stdout_bytes.decode()
    assert f'"checkpoints/{EVIL}"' in csv


def test_a_terminal_gets_even_csv_without_escape_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write("a,\x1b[31m\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write("a,\x1b[31m\n")
    assert capsys.readouterr().out == "a,\x1b[31m\na,\\x1b[31m\n"


def test_what_a_run_folder_of_such_a_name_shows():
    name = recorded(EVIL)
    assert f"{SHOWN}: 2 members" in evo("lineage", name).stdout.replace("3 members", "2 members")
    resumed = evo("resume", name)
    assert resumed.exit_code == 0, resumed.output
    assert f"Run folder: {SHOWN}" in resumed.stdout
    assert f"evo-grpo export '{SHOWN}' OUT" in resumed.stdout
    assert f"on 256 {SHOWN} prompts" in resumed.stdout
    exported = evo("export", name, "--best", "out")
    assert exported.stderr.startswith(f"error: {SHOWN}: its records name no ")
    again = evo("run", config(), "--out", name)
    assert f"error: {SHOWN}: expected a new or empty folder" in again.stderr
