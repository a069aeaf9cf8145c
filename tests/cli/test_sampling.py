"""The commands sample and evaluate on a run that was played."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_run import small
from typer.testing import CliRunner

from evo_grpo import run
from evo_grpo.cli.commands import app
from evo_grpo.record.choice import choose_of
from evo_grpo.record.summary import read_summary


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return run(small(), out=tmp_path_factory.mktemp("runs") / "one")


def evo(*arguments, stdin=None, expected=0):
    result = CliRunner().invoke(app, [str(one) for one in arguments], input=stdin)
    assert result.exit_code == expected, result.output
    return result


def test_a_prompt(folder):
    result = evo("sample", folder, "12+07=", "--n", 2)
    title = choose_of(folder).title
    assert result.stderr == f"loading {title} of {folder} ...\n"
    lines = result.stdout.splitlines()
    assert lines[0] == "> 12+07="
    assert lines[1] == f"{title}:"
    assert lines[4] == "base:"
    assert all(line.startswith("  - ") for line in (*lines[2:4], *lines[5:7]))


def test_lines_of_standard_input(folder):
    result = evo("sample", folder, "--no-base", "--n", 1, stdin="1+1=\n\n02+02=\x1b[2J\n")
    asked = [line for line in result.stdout.splitlines() if line.startswith("> ")]
    assert asked == ["> 1+1=", r"> 02+02=\x1b[2J"]
    assert "base:" not in result.stdout
    result = evo("sample", folder, "--n", 1, stdin="\n", expected=2)
    assert "expected a PROMPT, --row or lines of standard input" in result.stderr


def test_rows(folder):
    result = evo("sample", folder, "--row", 1, "--row", 2, "--n", 1, "--split", "test")
    assert result.stdout.count("> ") == 2
    assert result.stdout.count("[reward ") == 4
    result = evo("sample", folder, "1+1=", "--agent", 1, "--round", 1, "--n", 1, "--no-base")
    assert "agent 1 as it was after round 1, member 1:" in result.stdout


def test_a_run_is_evaluated_to_its_own_figures(folder):
    found = json.loads(evo("evaluate", folder, "--json").stdout)
    summary = read_summary(folder)
    assert found["own"] == {name: summary["best"][name] for name in ("mean", "se", "n")}
    assert (found["gain"], found["gain_se"]) == (summary["gain"], summary["gain_se"])
    low, high = found["interval"]
    assert low <= found["gain"] <= high


def test_an_export_is_evaluated_on_a_configuration(folder, tmp_path):
    evo("export", folder, tmp_path / "out")
    config = folder / "population.yaml"
    result = evo("evaluate", tmp_path / "out", config, "--prompts", 4, "--set", "seed=9")
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'out'}: ")
    assert "on 4 test prompts of sums" in lines[0]
    assert lines[1].startswith("base: ")
    assert "95% interval" in lines[2]
    alone = evo("evaluate", tmp_path / "out", config, "--no-base", "--split", "validation")
    assert len(alone.stdout.splitlines()) == 1


@pytest.mark.slow
def test_the_first_line_comes_before_torch_is_loaded(folder):
    """Loading takes seconds; that it has begun is said first."""
    code = (
        "import sys\n"
        "from evo_grpo.cli.commands import winner\n"
        "def said(text, err=False):\n"
        "    print(text, 'torch' in sys.modules)\n"
        "    sys.exit(0)\n"
        "winner.say = said\n"
        "sys.argv = ['evo-grpo', *sys.argv[1:]]\n"
        "from evo_grpo.cli import main\n"
        "main()\n"
    )
    for arguments in (["sample", str(folder), "1+1="], ["evaluate", str(folder)]):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[2],
        )
        print(f"{arguments[0]}: first line after {time.perf_counter() - start:.2f} s")
        assert done.stdout.startswith("loading "), done.stderr
        assert done.stdout.endswith(" False\n")
