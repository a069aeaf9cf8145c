"""`evo-grpo doctor`: what an issue needs to know of an installation, nothing private."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from evo_grpo.cli import doctor
from evo_grpo.cli.commands import app
from evo_grpo.training.sizing import cards
from evo_grpo.training.sizing.cards import Gpu


def said(*arguments):
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 0
    return result.stdout


def test_versions_devices_memory_and_extras(monkeypatch):
    monkeypatch.setattr(cards, "cuda_devices", list)
    document = json.loads(said("--json"))
    own = document["installation"]
    assert own["torch"].startswith(f"{torch.__version__}, built for ")
    assert "transformers " in own["packages"]
    assert "missing" not in own["packages"]
    assert own["memory"].endswith(" of this machine or container")
    assert own["models"].startswith("tiny-foods (embedded), tiny-sums (embedded), smollm2 (")
    assert "data (datasets " in own["extras"]
    assert not {"test", "dev", "docs", "browser"} & set(own["extras"].split())
    assert [line.split("  ")[0] for line in said().splitlines()] == list(own)


def test_no_path_and_no_secret_is_shown(monkeypatch):
    monkeypatch.setattr(cards, "cuda_devices", list)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HOME", "/home/somebody/models")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = said()
    assert "HF_HUB_OFFLINE=1" in text
    assert "HF_TOKEN is set" in text
    assert "hf_secret" not in text
    assert "somebody" not in text


def test_a_gpu_that_torch_does_not_see_is_warned_of(monkeypatch):
    monkeypatch.setattr(cards, "cuda_devices", lambda: [Gpu("card", 24 << 30)])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "warning: nvidia-smi lists a GPU, and torch, built for CPUs, sees none" in said()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "the driver may be too old for it" in said()


@pytest.mark.parametrize(
    ("found", "is_old"), [("2.12.1+cpu", True), ("2.13.0", False), ("10.0", False), (None, False)]
)
def test_a_version_that_is_too_old_is_found(monkeypatch, found, is_old):
    one = doctor.Requirement("torch", "2.13", "", found)
    assert one.is_old == is_old
    monkeypatch.setattr(doctor, "requirements", lambda: iter([one]))
    monkeypatch.setattr(cards, "cuda_devices", list)
    assert ("torch 2.12.1+cpu is below 2.13" in said()) == is_old
    assert ("torch is missing: pip install" in said()) == (found is None)


def test_a_machine_without_a_home_is_described_too(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("EVO_GRPO_CACHE", raising=False)
    monkeypatch.setattr("evo_grpo.cli.doctor.installed", lambda name: None)
    assert "smollm2 (cache: Could not determine home directory" in said()


def test_a_python_without_docstrings_is_refused_at_once():
    done = subprocess.run(
        [sys.executable, "-OO", "-m", "evo_grpo", "doctor"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: Python was started with -OO")
    assert done.stderr.count("\n") == 1
