"""docs/exporting.md: its commands and its code run as they stand there."""

import re
import shlex
from pathlib import Path

import pytest
from small_run import small
from typer.testing import CliRunner

from evo_grpo import run
from evo_grpo.cli.commands import app

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "exporting.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _with_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(small(), out="runs/first")


@pytest.mark.slow
def test_everything_on_the_page_runs_in_its_order(monkeypatch, capsys):
    commands = re.findall(r"^evo-grpo (.*)$", "".join(blocks("console")), re.MULTILINE)
    assert len(commands) == 13
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == 0, (command, result.output)
    in_the_folder, in_python = blocks("python")
    exec(compile(in_python, "exporting.md", "exec"), {})
    assert capsys.readouterr().out.startswith("12+07= (")
    monkeypatch.chdir("out")
    exec(compile(in_the_folder, "exporting.md", "exec"), {})
    assert len(capsys.readouterr().out.strip()) <= 4


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
