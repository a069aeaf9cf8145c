"""What the README shows runs as written."""

import re
from pathlib import Path

import pandas as pd
import pytest
import typer
import yaml

from evo_grpo import settings as configuration
from evo_grpo.cli.commands import app
from evo_grpo.settings import EnvConfig

README = Path(__file__).parents[1] / "README.md"


def blocks(language):
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


@pytest.mark.slow
@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[0][:40])
def test_python_runs(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code, str(README), "exec"), names)
    board = names["population"].leaderboard()
    assert isinstance(board, pd.DataFrame)
    assert len(board) == 8
    assert board["fitness"].notna().all()
    # The base answers a third of the sums; what the example shows is that the agents learn.
    assert board["fitness"].iloc[0] > 0.5
    # Of eight agents four play the second round, and two the last.
    assert sorted(board["left"].dropna()) == [0, 0, 0, 0, 1, 1]
    assert "fitness" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_example_is_about_ten_lines():
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 12


def test_yaml_loads(tmp_path):
    whole, part = blocks("yaml")
    (tmp_path / "population.yaml").write_text(whole)
    config = configuration.load(tmp_path / "population.yaml")
    assert config.model.name == "tiny-sums"
    assert EnvConfig.model_validate(yaml.safe_load(part)["env"]).kind == "dataset"


def test_the_tree_names_what_is_there():
    (tree,) = [text for text in blocks("") if text.startswith("evo_grpo/")]
    package = README.parent / "evo_grpo"
    named = [line.split()[0] for line in tree.splitlines() if line.startswith(" ")]
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    modules = {path.name for path in package.glob("[!_]*.py")}
    assert sorted(named) == sorted(folders | modules | {"assets/"})
    for line in tree.splitlines():
        assert line.startswith(" ") or (README.parent / line.split()[0]).is_dir(), line


def test_every_command_is_shown():
    (commands,) = [text for text in blocks("sh") if text.startswith("evo-grpo init")]
    shown = {line.split()[1] for line in commands.splitlines()}
    commands = typer.main.get_command(app).commands
    assert shown == {name for name, one in commands.items() if not one.hidden}
