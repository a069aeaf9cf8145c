"""`evo-grpo check --gpu` of a hub model, whose config.json alone is fetched."""

import json
import re
import time
from pathlib import Path

import pytest
from commands import evo
from loopback_hub import QWEN3_4B, hub_in_use

FILE = """
model: {name: owner/qwen, lora: {r: 16}}
env: sums
algorithm: {max_output_tokens: 512, max_model_len: 1024}
"""


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A hub, and a configuration of its model in the working folder; the requests."""
    monkeypatch.chdir(tmp_path)
    Path("q.yaml").write_text(FILE)
    models = {"owner/qwen": {"config.json": json.dumps(QWEN3_4B).encode()}}
    with hub_in_use(models, tmp_path / "hub", monkeypatch) as asked:
        yield asked


def check(*options):
    return evo("check", "q.yaml", *options)


@pytest.mark.parametrize(
    "options",
    [
        ("--set", "evolve.archive=true"),
        ("--set", "engine.rollout=vllm"),
        ("--set", "engine={rollout: vllm, vllm: {sleep_level: 2}, quantization: int8}"),
    ],
)
@pytest.mark.usefixtures("asked")
def test_what_check_proposes_passes_check(options):
    refused = check("--gpu", "24GB", *options)
    assert refused.exit_code == 2
    assert "does not fit into the 24 GB of 24GB" in refused.stdout
    (proposed,) = re.findall(r"with ((?:--set \S+ ?)+)", " ".join(refused.stdout.split()))
    passed = check("--gpu", "24GB", *options, *proposed.split())
    assert passed.exit_code == 0, passed.stderr
    assert "fits into the 24 GB of 24GB" in passed.stdout
    assert "engine.max_tokens_per_microbatch" in passed.stdout
    document = json.loads(check("--gpu", "24GB", "--json", *options, *proposed.split()).stdout)
    assert document["fit"]["fits"] is True
    assert set(document["fit"]["chosen"]) == {
        "engine.max_decode_rows",
        "engine.max_tokens_per_microbatch",
    }


def test_offline_nothing_is_asked_and_a_silent_hub_is_one_line(asked, monkeypatch):
    monkeypatch.setattr("evo_grpo.training.sizing.model_size.HUB_SECONDS", 0.5)
    offline = check("--offline")
    assert (offline.exit_code, asked) == (0, [])
    assert "its size is unknown until it is downloaded" in offline.stdout
    start = time.monotonic()
    silent = check("--set", "model.name=owner/slow")
    assert time.monotonic() - start < 5
    assert silent.exit_code == 0
    assert (
        len(re.findall(r"warning: model owner/slow: http.* (?:no answer|timed out)", silent.stdout))
        == 1
    )


@pytest.mark.usefixtures("asked")
def test_minutes_stand_beside_the_memory_of_a_known_card():
    shown = " ".join(check("--gpu", "h100").stdout.split())
    assert re.search(r"time about \S+ (s|min) without rewards: generate \S+ (s|min), learn", shown)
    assert "counted from its data sheet; completions as long as they may be" in shown
    measured = " ".join(check("--gpu", "h200").stdout.split())
    assert "counted from rates measured on this card, 2026-11-28" in measured
    assert "without rewards" not in check("--gpu", "80GB").stdout
    document = json.loads(check("--gpu", "h200", "--json").stdout)
    assert set(document["seconds"]) == {"generate", "learn", "evaluate", "measured"}


@pytest.mark.usefixtures("asked")
def test_bad_input_is_named(monkeypatch):
    unknown = check("--gpu", "rtx-4091")
    assert unknown.exit_code == 2
    assert "got 'rtx-4091', did you mean rtx-4090?" in str(unknown.stderr)
    missing = check("--gpu", "24GB", "--set", "model.name=owner/qwem")
    assert missing.exit_code == 2
    assert "has no such id, or a private one" in str(missing.stderr)
    assert "owner/qwem" in str(missing.stderr)
    monkeypatch.setattr("evo_grpo.training.sizing.model_size.HUB_SECONDS", 0.5)
    slow = check("--gpu", "24GB", "--set", "model.name=owner/slow")
    assert slow.exit_code == 2
    assert "--gpu 24GB: the memory of the run is unknown: http" in str(slow.stderr)
