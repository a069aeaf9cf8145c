"""The benchmarks run and write their numbers; what the numbers are is no test's business."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_doubles import FOLDER

ROOT = Path(__file__).resolve().parents[2]
TABLES = {
    "startup": {"Start-up (fresh interpreters)"},
    "decode": {
        "Decode: 8 adapters",
        "One step, embedded model, 256 rows of 8 adapters",
        "Shared prefill: 8 adapters, G=8, T=16",
    },
    "kl": {
        "Gradients per token of completions without a reward",
        "KL(policy || reference), nats per completion, after learn calls without a reward",
    },
    "evolve": {
        "8 agents, 1M (seconds)",
        "A round of 8 agents, task sums, default settings (seconds)",
    },
    "trackers": {"The default run (seconds)"},
    "engines": {"Two engines: 8 adapters"},
    "wire": {
        "Seconds in transfers, the first of which begins late",
        "On paper, 8 agents a card, 40 M parameters each: seconds",
        "Against the kernel's counters of the loopback",
        "An agent that is sent",
    },
    "processes": {
        "Two shards, default (seconds, medians of 1)",
        "Where the seconds go, default",
    },
    "longrun": {
        "8 rounds of 2 agents, checkpoints: last",
        "What grows, per 100 rounds",
        "Rounds that wait for the writer, of a run that plays as fast as it can",
        "Resume up to the next round (seconds)",
    },
}
# In place of vLLM a double answers.
PATHS = (str(FOLDER), os.environ.get("PYTHONPATH"))
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, PATHS)),
    "EVO_GRPO_DOUBLE": "echo",
}


#: Part of gpu.py -> what it prints in a rehearsal, with the double of vLLM.
PARTS = {
    "card": ("card, rates: ", "card, of the table: "),
    "plan": ("plan, Qwen2.5-rehearsal shape, 8 agents: what s, learn",),
    "real": ("real, fp32: what best, test", "real, bf16: what best, test", "real, vllm: what best"),
    "round": ("round, Qwen2.5-rehearsal shape, 8 agents: kernels", "round, longest gaps: "),
    "trl": ("trl, 8 of its steps over one of 8 agents, rehearsal: ",),
    "steps": ("] steps",),
    "speed": ("speed, Qwen2.5-rehearsal shape", "speed, generate against other libraries"),
    "launches": ("launches: not measured: why it needs a CUDA device",),
    "memory": ("plan, Qwen2.5-rehearsal shape, 4 agents: what MiB, agents",),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_measures_a_card_in_a_rehearsal(tmp_path):
    out = tmp_path / "gpu.json"
    script = ROOT / "experiments" / "bench" / "gpu.py"
    arguments = ("--rehearse", "--minutes", "9", "--vllm", sys.executable, "--out", str(out))
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **ENVIRONMENT},
    )
    assert done.returncode == 0, done.stderr
    assert "not finished" not in done.stdout
    said = {part: done.stdout.partition(f"] {part}: most_seconds")[2] for part in PARTS}
    assert [*said] == sorted(said, key=lambda part: -len(said[part]))  # in this order
    for (part, wanted), following in zip(PARTS.items(), [*PARTS, None][1:], strict=True):
        own = said[part].partition(f"] {following}: most_seconds")[0]
        for text in wanted:
            assert text in own, part
    result = json.loads(out.read_text(encoding="utf-8"))
    assert {check["verdict"] for check in result["checks"]} == {"not judged", "not measured"}
    assert {"card, rates", "real, bf16", "round, longest gaps"} <= set(result["rows"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("startup", ()),
        ("decode", ()),
        ("kl", ()),
        ("evolve", ("--no-peers",)),
        ("longrun", ("--rounds", "8")),
        ("trackers", ("--kinds", "tensorboard")),
        ("wire", ()),
        ("processes", ("--cases", "default")),
        ("engines", ("--python", sys.executable)),
    ],
)
def test_writes_its_numbers(tmp_path, name, arguments):
    out = tmp_path / "results" / f"{name}.json"
    script = ROOT / "experiments" / "bench" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, str(script), "--quick", "--out", str(out), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **ENVIRONMENT},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["bench"] == name
    assert result["arguments"]["quick"] is True
    assert result["threads"] == 1
    assert {"date", "machine", "versions", "rows", "checks"} <= set(result)
    assert {"torch", "transformers", "peft", "evo-grpo"} <= set(result["versions"])
    assert TABLES[name] <= set(result["rows"])
    assert all(lines for lines in result["rows"].values())
    # Small sizes are never held against the targets.
    assert {check["verdict"] for check in result["checks"]} == {"not judged"}
    assert str(ROOT) not in out.read_text(encoding="utf-8")
