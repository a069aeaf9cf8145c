"""`evo-grpo doctor`: what an issue needs to know of an installation, nothing private."""

import json
from pathlib import Path

import pytest
import torch
from commands import evo

from evo_grpo.cli.commands import install
from evo_grpo.training.sizing import cards
from evo_grpo.training.sizing.cards import Gpu


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cards, "cuda_devices", list)


def described(*arguments: str) -> str:
    return evo("doctor", *arguments, expected=0).stdout


@pytest.mark.usefixtures("no_gpu")
def test_versions_devices_memory_and_extras():
    lines = json.loads(described("--json"))["installation"]
    assert lines["torch"].startswith(f"{torch.__version__}, built for ")
    assert "transformers " in lines["packages"]
    assert "missing" not in lines["packages"]
    assert lines["memory"].endswith(" of this machine or container")
    assert lines["models"].startswith("tiny-foods (embedded), tiny-sums (embedded), smollm2 (")
    assert "data (datasets " in lines["extras"]
    assert not {"test", "dev", "docs", "browser"} & set(lines["extras"].split())
    assert [line.split("  ")[0] for line in described().splitlines()] == list(lines)


@pytest.mark.usefixtures("no_gpu")
def test_no_path_and_no_secret_is_shown(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HOME", "/home/somebody/models")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = described()
    assert "HF_HUB_OFFLINE=1" in text
    assert "HF_TOKEN is set" in text
    assert "hf_secret" not in text
    assert "somebody" not in text


def test_a_gpu_that_torch_does_not_see_is_warned_of(monkeypatch):
    monkeypatch.setattr(cards, "cuda_devices", lambda: [Gpu("card", 24 << 30)])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "warning: nvidia-smi lists a GPU, and torch, built for CPUs, sees none" in described()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "the driver may be too old for it" in described()


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("version", "warning"),
    [
        ("2.12.1+cpu", "torch 2.12.1+cpu is below 2.13"),
        (None, "torch is missing: pip install"),
        ("2.13.0", None),
        ("10.0", None),
    ],
)
def test_a_package_that_is_old_or_missing_is_warned_of(monkeypatch, version, warning):
    torch_2_13 = install.Requirement("torch", "2.13", "", version)
    monkeypatch.setattr(install, "requirements", lambda: iter([torch_2_13]))
    lines = [line for line in described().splitlines() if line.startswith("warning: torch")]
    assert len(lines) == (warning is not None)
    assert all(warning in line for line in lines)


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_a_home_is_described_too(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("EVO_GRPO_CACHE", raising=False)
    monkeypatch.setattr(install, "installed", lambda name: None)
    assert "smollm2 (cache: Could not determine home directory" in described()
