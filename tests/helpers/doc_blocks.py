"""Runs the code blocks of a page from top to bottom, as a reader would who types them in.

What a block is says its language: `python` runs, all blocks of a page in one namespace; `sh` and
`console` are commands, in `console` those behind `$ `; `yaml` has to be valid settings, a part of a
file or a whole one; `text` is output. A block with `title="name"` is also written to that file, and
Python with a title is a module that others import.

Comments right above a block say what a reader does not see:

    <!-- not run: reason -->            the block does not run here; the tests print why
    <!-- without steer, dashboard: reason -->   these commands of the block do not
    <!-- small: --set population.rounds=1 -->   options for its `evo-grpo run`
    <!-- given: runs/first, my.yaml a__b=3 -->   a small finished run at the one path, the settings
                                        of one in the other; see tests/helpers/small_run.py
    <!-- in: out -->                    the folder in which it runs
    <!-- fails: 2 -->                   the exit code that its last command has to have
    <!-- warns -->                      its warnings are no errors

`pip install` and `make` do not run: their extras have to be in pyproject.toml, their targets in the
Makefile.
"""

import os
import re
import shlex
import subprocess
import sys
import warnings
from contextlib import chdir
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import yaml
from small_run import small
from typer.testing import CliRunner

from evo_grpo.envs.registry import build_multi_turn, build_task, is_multi_turn
from evo_grpo.settings import EnvConfig, from_dict, load, to_yaml
from evo_grpo.settings.yaml import parse

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(
    r"(?P<above>(?:^[ ]*<!--[^\n]*-->\n)*)"
    r'^[ ]*```(?P<language>\w*)(?:[ ]title="(?P<title>[^"\n]+)")?[^\n`]*\n(?P<text>.*?)^[ ]*```$',
    re.DOTALL | re.MULTILINE,
)
MARK = re.compile(r"<!--\s*(\w[\w ,-]*?)(?::\s*(.*?))?\s*-->")
NAMES = {"not run", "small", "given", "in", "fails", "warns"}
LANGUAGES = {"python", "sh", "console", "yaml", "json", "text", ""}
# Built by `build_task` without a package that may be missing.
BUILT = ("dataset", "sums", "foods", "python:", "reasoning_gym:")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: Path of the page below the repository's root.
        line: The line of its fence, from 1.
        language: What stands behind the fence.
        title: The file that it is, if any.
        text: What is in it.
        marks: The comments above it, by their names.
    """

    page: str
    line: int
    language: str
    title: str | None
    text: str
    marks: dict[str, str]

    @property
    def place(self):
        return f"{self.page}:{self.line}"

    def skipped_commands(self):
        """The commands of evo-grpo that do not run here -> why."""
        return {
            name.strip(): reason
            for mark, reason in self.marks.items()
            if mark.startswith("without ")
            for name in mark.removeprefix("without ").split(",")
        }

    def commands(self):
        """The commands, one list of words each, without comments."""
        text = self.text.replace("\\\n", " ")
        lines = text.splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(page):
    """The blocks of a page, a path below the repository's root, from top to bottom."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.end("above")) + 1
        marks = {name: said for name, said in MARK.findall(match["above"])}
        for name, said in marks.items():
            if name not in NAMES and not name.startswith("without "):
                raise ValueError(f"{page}:{line}: unknown mark {name!r}: {said}")
        assert match["language"] in LANGUAGES, f"{page}:{line}: language {match['language']!r}"
        body = match["text"]
        found.append(Block(page, line, match["language"], match["title"], body, marks))
    return found


@dataclass
class PlayedPage:
    """What a page left behind: for the checks of single pages.

    Attributes:
        page: Its path below the repository's root.
        space: The names of its Python blocks.
        runs: (command, output) of each command of evo-grpo.
        configs: (the block, its settings) of each YAML block.
    """

    page: str
    space: dict = field(default_factory=lambda: {"__name__": "__main__"})
    runs: list = field(default_factory=list)
    configs: list = field(default_factory=list)


def play(page):
    """Run the blocks of a page, a path below the repository's root, in the current directory."""
    played = PlayedPage(page)
    for block in blocks(page):
        if "not run" in block.marks:
            continue
        try:
            _run(block, played)
        except Exception as error:
            error.add_note(f"{block.place}, this block:\n{block.text}")
            raise
    return played


def _run(block, played):
    for given in filter(None, block.marks.get("given", "").split(",")):
        make_given(*given.split())
    if block.title:
        Path(block.title).parent.mkdir(parents=True, exist_ok=True)
        Path(block.title).write_text(block.text, encoding="utf-8")
    with warnings.catch_warnings(), chdir(block.marks.get("in", ".")):
        if "warns" in block.marks:
            warnings.simplefilter("always")
        if block.language == "python" and not block.title:
            exec(compile(block.text, block.place, "exec"), played.space)
        elif block.language in ("sh", "console"):
            _run_commands(block, played)
        elif block.language == "yaml":
            played.configs.append((block, _settings(block)))


def make_given(path, *settings):
    """Make a small finished run, or the settings of one, at a path; see `given` above."""
    from evo_grpo import run

    changes = dict(setting.split("=", 1) for setting in settings)
    config = small(**{name: yaml.safe_load(text) for name, text in changes.items()})
    if Path(path).suffix == ".yaml":
        Path(path).write_text(to_yaml(config), encoding="utf-8")
    elif not Path(path).exists():
        run(config, out=path)


def _settings(block):
    """Check settings: a whole file, or a part of one beside the least that a file needs."""
    data = parse(block.text, block.place)
    if block.title and {"model", "env"} <= set(data):
        config = load(Path(block.title))
    else:
        config = from_dict({"model": "tiny-sums", "env": "sums", **data})
    if "env" in data:
        _build(config.env)
    return config


def _build(env: EnvConfig):
    """Build a task where all that it needs is here: its files are those of the page."""
    if not env.kind.startswith(BUILT):
        return
    if env.kind.startswith("reasoning_gym:") and find_spec("reasoning_gym") is None:
        return
    if is_multi_turn(env.kind):
        text, _ = build_multi_turn(env, 0)().reset(seed=0)
        assert text
    elif env.train is None or Path(env.train).exists():
        task = build_task(env, 0)
        assert all(task.splits[split] for split in ("train", "validation", "test"))


def _run_commands(block, played):
    commands = block.commands()
    skipped = block.skipped_commands()
    for words in commands:
        program, *arguments = words
        if program in ("pip", "make"):
            _check_outside(program, arguments)
        elif program == "python":
            _run_python(arguments)
        elif program == "evo-grpo":
            if arguments[0] in skipped:
                continue
            if arguments[0] == "run":
                arguments += shlex.split(block.marks.get("small", ""))
            expected = int(block.marks.get("fails", 0)) if words is commands[-1] else 0
            played.runs.append((words[1:], _evo(arguments, expected)))
        else:
            raise AssertionError(f"{block.place}: expected pip, make, python or evo-grpo: {words}")


def _evo(arguments, expected):
    from evo_grpo.cli.commands import app

    result = CliRunner().invoke(app, arguments)
    if result.exit_code != expected:
        shown = f"evo-grpo {shlex.join(arguments)}\nexit code {result.exit_code}\n{result.output}"
        raise AssertionError(shown) from result.exception
    return result.output


def _run_python(arguments):
    """Run `python file` in a process of its own, in which this checkout is what is imported."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, f"python {shlex.join(arguments)}\n{done.stdout}{done.stderr}"


def _check_outside(program, arguments):
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        named = [word for word in arguments if "=" not in word and not word.startswith("-")]
        assert set(named) <= set(targets), named
        return
    extras = re.search(
        r"^\[project\.optional-dependencies\]\n(.*?)^\[",
        (ROOT / "pyproject.toml").read_text(),
        re.DOTALL | re.MULTILINE,
    )[1]
    known = set(re.findall(r"^([a-z0-9]+) = \[", extras, re.MULTILINE))
    for named in re.findall(r"(?:evo-grpo|\.)\[([\w,]+)\]", " ".join(arguments)):
        assert set(named.split(",")) <= known, named
