"""Datasets of the Hugging Face Hub, through a Hub on the loopback; see helpers/loopback_hub.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from loopback_hub import COMMITS, loopback_hub
from small_run import SETTINGS, outcome

from evo_grpo.envs.data.hub import hub_dataset
from evo_grpo.errors import ConfigError
from evo_grpo.settings import EnvConfig
from evo_grpo.settings.objects import HubDataset
from evo_grpo.sources import embedded_models

ROOT = Path(__file__).resolve().parents[3]
README = """---
configs:
- config_name: main
  default: true
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train.jsonl}
- config_name: chat
  data_files:
  - {split: train, path: chat/train.jsonl}
---
"""

CHATS = [
    [{"role": "user" if turn % 2 == 0 else "assistant", "content": f"{n}.{turn}"} for turn in turns]
    for n, turns in enumerate(range(count) for count in (2, 3, 4, 5, 6))
]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}a:"


def repository(tag):
    """The files of a dataset with the shape of gsm8k."""

    def lines(count, split):
        rows = [
            {"question": f"{split} {n}?", "answer": f"{tag}: {n}\n#### {n}"} for n in range(count)
        ]
        return "".join(json.dumps(row) + "\n" for row in rows).encode()

    return {
        "README.md": README.encode(),
        "main/train.jsonl": lines(30, "train"),
        "main/test.jsonl": lines(5, "test"),
        "socratic/train.jsonl": lines(4, "socratic"),
        "chat/train.jsonl": b"".join(
            json.dumps({"messages": chat}).encode() + b"\n" for chat in CHATS
        ),
    }


HUB = {
    "openai/gsm8k": {COMMITS[0]: repository("old"), COMMITS[1]: repository("new")},
    "openai/gated": {COMMITS[1]: repository("x")},
}
# One process for all cases: the Hub's address is read when its package is imported.
SCRIPT = """
import json, sys, time
import datasets
from evo_grpo.envs.data import hub
from transformers import AutoTokenizer
from evo_grpo.envs.registry import build_task
from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.errors import EvoGrpoError
from evo_grpo.sources import embedded_models
from evo_grpo.settings import EnvConfig, from_dict
from evo_grpo.training.recorded_inputs import inputs_of

hub.TIMEOUT = 1.0
def score(completion, answer): return 1.0
def env(train="openai/gsm8k", **more):
    return EnvConfig(kind="dataset", train=train, reward=score, prompt="{question}", **more)

found = {}
own = datasets.load_dataset("openai/gsm8k", "main", split="train", revision="a" * 40)
task = build_task(env({"path": "openai/gsm8k", "revision": "a" * 40}, test="openai/gsm8k",
    validation={"path": "openai/gsm8k", "split": "train[:3]"}), 0)
found["train"] = list(task.splits["train"]) == list(own)
def first_batch(train, **more):
    settings = env(train, test="openai/gsm8k", **more)
    made = ReasoningGym.from_task(build_task(settings, 7), tokenizer, batch_size=6, seed=7)
    return [(prompt.text, prompt.columns) for prompt in made.batch(0)]

tokenizer = AutoTokenizer.from_pretrained(embedded_models()["tiny-sums"])
found["batch"] = first_batch({"path": "openai/gsm8k", "revision": "a" * 40}) == first_batch(own)
found["test"] = [row["answer"][:4] for row in task.splits["test"]]
found["validation"] = len(task.splits["validation"])
found["pinned"] = {name: one.revision for name, one in hub.pinned(env(test="openai/gsm8k")).items()}
narrow = {"path": "openai/gsm8k", "name": "socratic", "columns": {"question": "answer"}}
found["columns"] = hub.read_hub(hub.HubDataset(**narrow), "train", 1.0)[0]
tokenizer.chat_template = sys.argv[2]
chat = {"path": "openai/gsm8k", "name": "chat"}
chats = dict.fromkeys(("train", "validation", "test"), chat | {"split": "train"})
task = build_task(EnvConfig(kind="dataset", reward=lambda completion: 1.0, **chats), 0)
made = ReasoningGym.from_task(task, tokenizer)
found["chats"] = [list(made.row("test", n).token_ids) for n in range(5)]
found["expected"] = [
    tokenizer.apply_chat_template(
        [m for m in row["messages"] if m is not row["messages"][-1] or m["role"] == "user"],
        add_generation_prompt=True, return_dict=False)
    for row in datasets.load_dataset("openai/gsm8k", "chat", split="train")]
config = from_dict({"model": "tiny-sums", "env": env()})
found["digest"] = len(inputs_of(config).files["env.train"])
for name, train in json.loads(sys.argv[1]).items():
    start = time.monotonic()
    try:
        build_task(env(train), 0)
        found[name] = "read"
    except EvoGrpoError as error:
        found[name] = str(error)
    found[name + ": late"] = time.monotonic() - start > 5
print(json.dumps(found))
"""
REFUSED = {
    "missing": ("nobody/nothing", "'nobody/nothing': expected one of the Hub that you may read"),
    "gated": ("openai/gated", "got GatedRepoError; correct the name owner/name, "),
    "hanging": ("openai/slow", "within 1 s, got none"),
    "revision": ({"path": "openai/gsm8k", "revision": "v9"}, "as revision, got 'v9'"),
    "name": ({"path": "openai/gsm8k", "name": "mian"}, "'mian' not found. Available"),
    "split": (
        {"path": "openai/gsm8k", "split": "vali"},
        "split 'vali': expected a name, split and columns that can be read: Unknown split",
    ),
    "column": (
        {"path": "openai/gsm8k", "columns": ["question", "anwser"]},
        "columns that can be read: Column name ['anwser'] not in the dataset",
    ),
}


def asking(url, folder):
    """The environment of a process that asks this Hub alone, with a cache of its own."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": url,
        "HF_HOME": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.slow
def test_a_dataset_of_the_hub_is_found_pinned_read_as_datasets_does_or_named(tmp_path):
    pytest.importorskip("datasets", reason="needs the extra data")
    with loopback_hub(HUB) as (_, url):
        environment = {**asking(url, tmp_path), "HF_TOKEN": "hf_not-to-be-shown"}
        cases = json.dumps({name: train for name, (train, _) in REFUSED.items()})
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, cases, TEMPLATE],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "hf_not" not in done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["train"] is True  # as `datasets` reads the older commit
    assert found["batch"] is True
    assert found["test"] == ["new:"] * 5
    assert found["validation"] == 3
    assert found["pinned"] == {"train": COMMITS[1], "test": COMMITS[1]}
    assert found["columns"] == {"question": "new: 0\n#### 0"}
    assert found["digest"] == 64
    assert found["chats"] == found["expected"]
    for name, (_, message) in REFUSED.items():
        assert message in found[name], name
        assert not found[f"{name}: late"], name


@pytest.mark.slow
def test_a_run_of_a_model_and_a_dataset_of_the_hub_goes_on_without_it(tmp_path):
    pytest.importorskip("datasets", reason="needs the extra data")
    model = embedded_models()["tiny-sums"]
    rows = [{"question": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"} for a in range(9)
            for b in range(6)]  # fmt: skip
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    hub = {
        "someone/tiny": {COMMITS[1]: {p.name: p.read_bytes() for p in model.iterdir()}},
        "someone/sums": {COMMITS[1]: {"train.jsonl": data}},
    }
    (tmp_path / "my_rewards.py").write_text(
        "def last(completion, answer):\n    return float(completion[-1:] == answer[-1])\n"
    )
    task = {"kind": "dataset", "train": "someone/sums", "prompt": "{question}",
            "reward": "my_rewards:last"}  # fmt: skip
    settings = {**SETTINGS, "model": "someone/tiny", "env": task}
    (tmp_path / "run.yaml").write_text(json.dumps(settings))  # JSON is YAML

    def evo(*arguments, **more):
        done = subprocess.run(
            [sys.executable, "-m", "evo_grpo", *arguments],
            env={**environment, **more}, cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    with loopback_hub(hub) as (_, url):
        environment = asking(url, tmp_path)
        evo("run", "run.yaml", "--out", "whole")
        evo("run", "run.yaml", "--out", "run", "--set", "population.rounds=2")
    # The Hub is gone.
    evo("resume", "run", "--rounds", "3", HF_HUB_OFFLINE="1")
    first, second = outcome(tmp_path / "whole"), outcome(tmp_path / "run")
    assert first["leaderboard"] == second["leaderboard"]
    assert first["rounds"] == second["rounds"]


def test_what_names_a_dataset_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows").write_text("")
    assert hub_dataset("openai/gsm8k") == HubDataset(path="openai/gsm8k")
    assert hub_dataset("owner/data-v1.1") is not None
    for other in ("gsm8k", "data/rows", "data/rows.csv", "./gsm8k", "a/b/c", [{"a": 1}], None):
        assert hub_dataset(other) is None


def test_the_settings_of_a_dataset_are_checked():
    given = EnvConfig(kind="dataset", train={"path": "a/b", "columns": ["q"]})
    assert given.train.columns == {"q": "q"}
    with pytest.raises(ConfigError, match=r"train.splt: unknown key; did you mean 'split'"):
        EnvConfig(kind="dataset", train={"path": "a/b", "splt": "test"})
    with pytest.raises(ConfigError, match=r"train.columns: expected a list of columns, or a mapp"):
        EnvConfig(kind="dataset", train={"path": "a/b", "columns": {"q": 1}})
