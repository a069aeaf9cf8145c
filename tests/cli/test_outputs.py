"""The command in a process of its own: its two entry points, and outputs closed or full."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shown_run import run_folder

ROOT = Path(__file__).resolve().parents[2]
FULL = Path("/dev/full")
MODULE = ("-B", "-m", "evo_grpo")
SCRIPT = ("-c", "import sys; from evo_grpo.cli import main; sys.exit(main())")


@pytest.fixture(autouse=True)
def _files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("population.yaml").write_text("model: tiny-sums\nenv: sums\n")
    run_folder()


def command(*arguments: str, entry=MODULE, stdout=subprocess.PIPE):
    return subprocess.run(
        [sys.executable, *entry, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("entry", [MODULE, SCRIPT], ids=["module", "console script"])
def test_the_entry_points_print_the_same(entry):
    done = command("check", "./population.yaml", entry=entry)
    assert done.stdout.startswith("population.yaml is valid.")
    assert done.stderr == ""


def test_a_closed_standard_output_is_no_error():
    shell = f'"{sys.executable}" -m evo_grpo check population.yaml >&-'
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [("check", "population.yaml"), ("leaderboard", "runs/one")])
def test_a_reader_that_left_is_no_traceback(arguments):
    read, write = os.pipe()
    os.close(read)
    done = command(*arguments, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "arguments", ["--version", "check", "schema", "leaderboard runs/one --csv", "resume runs/one"]
)
def test_standard_output_that_is_full(arguments: str):
    with FULL.open("w") as full:
        done = command(*arguments.split(), stdout=full)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.splitlines()[0].endswith("No space left on device")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_python_without_docstrings_is_refused_at_once():
    done = command("doctor", entry=("-OO", "-m", "evo_grpo"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: Python was started with -OO")
    assert done.stderr.count("\n") == 1
