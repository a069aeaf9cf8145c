"""What the README shows runs as written."""

import os
import re
import shlex
from pathlib import Path

import doc_blocks
import pandas as pd
import pytest
import typer
import yaml
from installed import clone, install, shell

from evo_grpo import settings as configuration
from evo_grpo.cli.commands import app
from evo_grpo.settings import EnvConfig

README = Path(__file__).parents[1] / "README.md"
SH = [block for block in doc_blocks.blocks("README.md") if block.language == "sh"]


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


def test_every_command_is_named_and_those_that_people_need_are_shown():
    (shown,) = [text for text in blocks("sh") if "evo-grpo init" in text]
    examples = re.findall(r"^evo-grpo (\w+)", shown, re.MULTILINE)
    text = README.read_text().partition("## The command line")[2].partition("\n## ")[0]
    others = set(re.findall(r"`([a-z]+)`", text))
    commands = typer.main.get_command(app).commands
    known = {name for name, one in commands.items() if not one.hidden}
    assert len(examples) == 7
    assert {*examples, *others} >= known


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_make_run_ends_with_commands_that_work(tmp_path):
    """With the packages that `make run` installs, in a shell without their environment."""
    folder = clone(tmp_path)
    recipe = shell("make -n run", folder)
    (extras,) = re.findall(r"-e '?\.(?:\[([\w,]*)\])?'?$", recipe, re.MULTILINE)
    install(folder / ".venv", [name for name in extras.split(",") if name], folder)
    (stamp,) = re.findall(r"^touch (\.venv/\.run-\d+)$", recipe, re.MULTILINE)
    (folder / stamp).touch()
    (small,) = {block.marks["small"] for block in SH if "small" in block.marks}
    printed = shell(f'make run ARGS="{small}"', folder)
    (proposed,) = re.findall(r"^Next: (.*)$", printed, re.MULTILINE)
    commands = proposed.split(", ")
    assert commands[0] == ".venv/bin/evo-grpo report runs/population-1"
    for command in commands:
        shell(command, folder)
    assert (folder / "runs" / "population-1" / "report.html").exists()
    assert (folder / "OUT" / "adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_run_in_order(tmp_path, monkeypatch):
    """As a user types them, with the packages that the README names and no others.

    From the wheel that `make test-slow` builds, without which they run from a clone.
    """
    wheel = os.environ.get("EVO_GRPO_WHEEL")
    (pip,) = [words for block in SH for words in block.commands() if words[0] == "pip"]
    extras = re.search(r"\[([\w,]+)\]", pip[-1])[1].split(",")
    origin = Path(wheel).resolve() if wheel else clone(tmp_path)
    install(tmp_path / "env", extras, origin)
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    ran = []
    for block in SH:
        for given in filter(None, block.marks.get("given", "").split(",")):
            doc_blocks.make_given(*given.split())
        for words in block.commands():
            if words[0] == "evo-grpo" and words[1] not in block.skipped_commands():
                more = shlex.split(block.marks.get("small", "")) if words[1] == "run" else []
                shell(shlex.join([*words, *more]), folder, tmp_path / "env" / "bin")
                ran.append(words[1])
    assert ran == ["init", "check", "try", "run", "resume", "report", "export"]
    assert (folder / "runs" / "first" / "report.html").exists()
