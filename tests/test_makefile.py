"""What `make` installs, and when, with a Python that only takes notes."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Makes an environment whose programs are itself, and notes what pip is to install.
PYTHON = """#!/bin/sh
case "$*" in
  *"-m venv "*)
    mkdir -p .venv/bin && for name in python evo-grpo ruff pyright; do
      cp "$0" .venv/bin/$name
    done ;;
  *"-m pip install "*) echo "install ${*##*-c constraints.txt }" >> notes ;;
  *"-m pytest "*) echo pytest >> notes ;;
esac
case "$0" in *evo-grpo) echo "evo-grpo $*" >> notes ;; esac
"""
TORCH = next(
    line
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line.startswith("torch=")
)
FOR_A_RUN = [f"install {TORCH}", "install -e .[report]"]
FOR_TESTS = ["install -e .[dev]"]
RUN = ["evo-grpo run population.yaml --compare"]


@pytest.fixture(autouse=True)
def _a_fresh_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if shutil.which("make") is None:
        pytest.skip("needs make")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python-of-the-test"
    python.write_text(PYTHON)
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for name in ("MAKEFLAGS", "MAKELEVEL", "PIP_ARGS", "ARGS"):
        monkeypatch.delenv(name, raising=False)


def make(target: str) -> list[str]:
    """What a target did, step by step."""
    Path("notes").unlink(missing_ok=True)
    python = Path("python-of-the-test").absolute()
    subprocess.run(["make", target, f"PYTHON={python}"], capture_output=True, text=True, check=True)
    return Path("notes").read_text().splitlines() if Path("notes").exists() else []


def test_a_run_needs_no_tools_of_developers():
    assert make("run") == FOR_A_RUN + RUN
    assert make("run") == RUN


def test_tests_after_a_run_add_the_rest():
    make("run")
    assert make("test") == [*FOR_TESTS, "pytest"]
    assert make("test") == ["pytest"]
    assert make("run") == RUN


def test_the_tortures_have_a_target_each_with_its_own_tests():
    """Neither runs what the other does: each has an hour of its own."""
    said = [
        subprocess.run(["make", "-n", target], capture_output=True, text=True, check=True).stdout
        for target in ("torture", "torture-io")
    ]
    folders = [set(re.findall(r"tests/torture\w*", text)) for text in said]
    assert folders == [{"tests/torture"}, {"tests/torture_io"}]
    assert all("torture_table.py" in text for text in said)
    shown = subprocess.run(["make", "help"], capture_output=True, text=True, check=True).stdout
    assert "make torture-io " in shown


def test_what_is_marked_for_a_target_of_its_own_is_not_fast():
    markers = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    own = {
        line.partition(":")[0]: re.findall(r"`make ([\w-]+)`", line) for line in markers["markers"]
    }
    said = {
        target: subprocess.run(
            ["make", "-n", target], capture_output=True, text=True, check=True
        ).stdout
        for target in {"test", *(name for names in own.values() for name in names)}
    }
    assert own["device"] == ["test-device"]
    for marker, targets in own.items():
        assert (f"not {marker}" in said["test"]) is bool(targets), marker
    assert "-m device tests/device" in said["test-device"]


def test_a_run_after_tests_installs_nothing():
    assert make("test") == [*FOR_A_RUN, *FOR_TESTS, "pytest"]
    assert make("run") == RUN
    assert make("install") == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_what_changed_is_installed_again(name: str):
    make("install")
    with Path(name).open("a") as file:
        file.write("# changed\n")
    assert make("run") == FOR_A_RUN + RUN
    assert make("install") == FOR_TESTS
    assert make("install") == []


def test_what_changed_back_is_installed_again():
    make("install")
    before = Path("constraints.txt").read_text()
    Path("constraints.txt").write_text(f"{before}# changed\n")
    make("run")
    Path("constraints.txt").write_text(before)
    assert make("test") == [*FOR_A_RUN, *FOR_TESTS, "pytest"]


def test_an_install_that_failed_is_tried_again():
    make("run")
    pip = Path(".venv/bin/python")
    working = pip.read_text()
    pip.write_text(working.replace("notes ;;", "notes; exit 1 ;;", 1))
    with pytest.raises(subprocess.CalledProcessError):
        make("test")
    pip.write_text(working)
    assert make("test") == [*FOR_TESTS, "pytest"]
