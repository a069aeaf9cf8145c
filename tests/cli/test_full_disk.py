"""The command in a process of its own: its two entry points, closed outputs, and full disks."""

import os
import resource
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


def command(*arguments: str, room: int | None = None, entry=MODULE, stdout=subprocess.PIPE):
    """Run a command; `room` is the largest file that it may write, in bytes."""

    def limit():
        if room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    return subprocess.run(
        [sys.executable, *entry, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=limit,
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


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (["init", "mine.yaml"], "mine.yaml"),
        (["schema", "--out", "mine.json"], "mine.json"),
        (["init", "population.yaml", "--force"], "population.yaml"),
    ],
)
def test_a_file_of_which_only_a_part_can_be_written_is_named(arguments: list[str], file: str):
    before = Path(file).exists()
    done = command(*arguments, room=100)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {file}: File too large\n"
    assert Path(file).exists() == before


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
