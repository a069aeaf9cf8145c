"""A disk that is full: the message names what could not be written, and no traceback follows."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from shown_run import run_folder
from typer.testing import CliRunner

from evo_grpo.cli.commands import app

FULL = Path("/dev/full")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def command(*arguments: str, room: int | None = None, **options) -> subprocess.CompletedProcess:
    """Run a command; `room` is the largest file that it may write, in bytes."""

    def limit():
        if room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    return subprocess.run(
        [sys.executable, "-B", "-m", "evo_grpo", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=limit,
        **options,
    )


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (["init", "mine.yaml"], "mine.yaml"),
        (["schema", "--out", "mine.json"], "mine.json"),
    ],
)
def test_a_file_of_which_only_a_part_can_be_written(arguments: list[str], file: str):
    done = command(*arguments, room=100, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {file}: File too large\n"
    assert not Path(file).exists()


def test_a_file_that_was_there_is_named_and_not_deleted():
    Path("mine.yaml").write_text("name: mine\n")
    done = command("init", "mine.yaml", "--force", room=100, stdout=subprocess.PIPE)
    assert done.stderr == "error: mine.yaml: File too large\n"
    assert Path("mine.yaml").exists()


@pytest.mark.slow
@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["check", "population.yaml"],
        ["schema"],
        ["leaderboard", "runs/one"],
        ["leaderboard", "runs/one", "--csv"],
        ["lineage", "runs/one"],
        ["resume", "runs/one"],
    ],
)
def test_standard_output_that_is_full(arguments: list[str]):
    CliRunner().invoke(app, ["init"])
    run_folder()
    with FULL.open("w") as full:
        done = command(*arguments, stdout=full)
    assert done.stderr.splitlines()[0] == "error: standard output: No space left on device"
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_reader_that_left_is_no_error():
    run_folder()
    read, write = os.pipe()
    os.close(read)
    done = command("leaderboard", "runs/one", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
