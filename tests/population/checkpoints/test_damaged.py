"""Files of a checkpoint or a base that say nonsense: an error that names the file, no traceback."""

import json
import shutil
from pathlib import Path

import pytest

from evo_grpo import GRPO
from evo_grpo.errors import CheckpointError, ModelError
from evo_grpo.sources import resolve


@pytest.fixture(scope="module")
def agent():
    return GRPO(model="tiny-sums")


@pytest.fixture(scope="module")
def saved(agent, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "agent"
    agent.save_checkpoint(folder)
    return folder


@pytest.fixture
def checkpoint(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "agent")


CONFIGS = {
    "deep": "[" * 5000,
    "a list": "[]",
    "another type": {"peft_type": "LOHA"},
    "rank beyond memory": {"r": 10**9},
    "no modules": {"target_modules": None},
    "modules as half a pattern": {"target_modules": "("},
    "alpha without end": {"lora_alpha": float("inf")},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_damaged_adapter_config_is_named(agent, checkpoint, name):
    file = checkpoint / "actor" / "adapter_config.json"
    change = CONFIGS[name]
    text = change if isinstance(change, str) else json.dumps(json.loads(file.read_text()) | change)
    file.write_text(text)
    for load, folder in (
        (agent.load_checkpoint, checkpoint),
        (agent.load_checkpoint, checkpoint / "actor"),
        (GRPO.load, checkpoint),
    ):
        with pytest.raises(CheckpointError, match=r"adapter_config.json: "):
            load(folder)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("data", [b"", b"\x80\x04garbage"])
def test_a_foreign_pytorch_model_bin_is_named(tmp_path, data):
    folder = shutil.copytree(Path(resolve("tiny-sums").path), tmp_path / "base")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(ModelError, match="cannot be loaded from"):
        GRPO(model=str(folder))
