"""The command in a process of its own: its two entry points, and closed outputs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENTRY_POINTS = {
    "console script": ["-c", "import sys; from evo_grpo.cli import main; sys.exit(main())"],
    "module": ["-m", "evo_grpo"],
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    Path("population.yaml").write_text("model: tiny-sums\nenv: sums\n")


@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_the_entry_points_print_the_same(entry: str):
    command = [sys.executable, *ENTRY_POINTS[entry], "check", "./population.yaml"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout.startswith(b"population.yaml is valid.")
    assert done.stderr == b""


@pytest.mark.skipif(os.name == "nt", reason="closes a descriptor by a shell of Unix")
def test_a_closed_standard_output_is_no_error():
    command = f'"{sys.executable}" -m evo_grpo check population.yaml >&-'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_left_is_no_traceback():
    with subprocess.Popen(
        [sys.executable, "-m", "evo_grpo", "check", "population.yaml"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as command:  # fmt: skip
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode == 1
