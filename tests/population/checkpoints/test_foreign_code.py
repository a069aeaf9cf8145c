"""Data never becomes code: what a checkpoint or a model folder says runs no Python of its own."""

import builtins
import json
import shutil

import pytest
from peft import LoraConfig

from evo_grpo import GRPO, Population, agilerl
from evo_grpo.errors import CheckpointError, ConfigError, EngineUnavailable, ModelError
from evo_grpo.model.base import SharedBase
from evo_grpo.rollout.native.native_engine import NativeEngine
from evo_grpo.settings import VLLMSettings
from evo_grpo.sources import resolve

SUMS = {
    "model": "tiny-sums",
    "lora": LoraConfig(r=2, target_modules=["q_proj"]),
    "max_output_tokens": 3,
    "device": "cpu",
}
CODE = """
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).write_text("ran")

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(autouse=True)
def _nobody_is_asked(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(builtins, "input", lambda *_: asked.append("asked") or "y")
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    yield
    assert asked == []


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "ran"


@pytest.fixture
def model(tmp_path, marker):
    """A model folder that is tiny-sums in weights, and Python of its own beside them."""
    folder = tmp_path / "own-model"
    shutil.copytree(resolve("tiny-sums").path, folder)
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def checkpoint(tmp_path):
    GRPO(**SUMS).save_checkpoint(tmp_path / "agent")
    return tmp_path / "agent"


def say(checkpoint, **model):
    """Write something into the settings of the model that attributes.json holds."""
    file = checkpoint / "attributes.json"
    data = json.loads(file.read_text())
    data["settings"]["model"] |= model
    data["base"] = model.get("name", data["base"])
    file.write_text(json.dumps(data))


SAYS = [
    {},
    {"trust_remote_code": True},
    {"config": {"trust_remote_code": True}},
    {"trust_remote_code": True, "config": {"trust_remote_code": None}},
]


@pytest.mark.parametrize("says", SAYS)
def test_a_checkpoint_cannot_have_the_code_of_its_base_run(checkpoint, model, marker, says):
    say(checkpoint, name=str(model), **says)
    with pytest.raises((ModelError, CheckpointError), match=r"trust_remote_code"):
        GRPO.load(checkpoint)
    assert not marker.exists()


@pytest.mark.parametrize("says", SAYS)
@pytest.mark.parametrize("tokenizer", [True, False])
def test_nor_the_code_that_came_inside_it(checkpoint, model, marker, says, tokenizer):
    if not tokenizer:
        (model / "tokenizer_config.json").unlink()
    model.rename(checkpoint / "base")
    say(checkpoint, **says)
    with pytest.raises((ModelError, CheckpointError), match=r"trust_remote_code"):
        GRPO.load(checkpoint, device="cpu")
    assert not marker.exists()


def test_the_caller_may_trust_it(checkpoint, model, marker):
    say(checkpoint, name=str(model))
    loaded = GRPO.load(checkpoint, trust_remote_code=True)
    assert marker.exists()
    assert loaded.settings.model.trust_remote_code is True
    marker.unlink()
    assert agilerl.GRPO.load(checkpoint, trust_remote_code=True) is not None


def test_a_population_may_be_trusted_and_is_not_by_default(tmp_path, model, marker):
    GRPO.population(size=2, **SUMS).save(tmp_path / "p")
    for agent in ("agent-00", "agent-01"):
        say(tmp_path / "p" / agent, name=str(model), trust_remote_code=True)
    with pytest.raises(ModelError, match=r"trust_remote_code"):
        Population.load(tmp_path / "p", device="cpu")
    assert not marker.exists()
    assert len(Population.load(tmp_path / "p", device="cpu", trust_remote_code=True)) == 2


@pytest.mark.parametrize("value", [1, "yes", None])
def test_trust_is_true_or_false(checkpoint, value):
    with pytest.raises(ConfigError, match=r"^trust_remote_code: expected True or False, got"):
        GRPO.load(checkpoint, trust_remote_code=value)
    with pytest.raises(ModelError, match=r"trust_remote_code: expected true or false, got"):
        SharedBase.load("tiny-sums", device="cpu", trust_remote_code=value)


def test_a_checkpoint_cannot_have_a_program_started_as_its_engine(checkpoint, marker, tmp_path):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ntouch {marker}\n")
    program.chmod(0o755)
    file = checkpoint / "attributes.json"
    data = json.loads(file.read_text())
    own = {"python": str(program), "adapter_folder": str(tmp_path / "adapters")}
    data["settings"]["engine"] |= {"rollout": "vllm", "vllm": own}
    file.write_text(json.dumps(data))
    loaded = GRPO.load(checkpoint, device="cpu")
    assert isinstance(loaded.cohort.engine, NativeEngine)
    assert loaded.settings.engine.vllm == VLLMSettings()
    assert not marker.exists()
    assert not (tmp_path / "adapters").exists()
    # The same settings of the caller's own do start it.
    with pytest.raises(EngineUnavailable, match="cannot be run"):
        GRPO(**SUMS, rollout="vllm", vllm=own)
    assert marker.exists()


@pytest.mark.parametrize(
    "config",
    [
        {"use_kernels": True},
        {"attn_implementation": "somebody/kernels"},
        {"weights_only": False},
        {"dtype": "__import__"},
        {"key_mapping": {"a": 1}},
    ],
)
def test_keywords_that_are_not_on_the_list_are_refused_by_name(checkpoint, config):
    say(checkpoint, config=config)
    (name,) = config
    expected = rf"attributes.json: settings.model.config.{name}: expected .*; build the agent"
    with pytest.raises(CheckpointError, match=expected):
        GRPO.load(checkpoint)


def test_a_model_folder_runs_no_code_and_asks_nobody(model, marker):
    with pytest.raises(ModelError, match=r"trust_remote_code=True"):
        SharedBase.load(str(model), device="cpu")
    with pytest.raises(ModelError, match=r"trust_remote_code=True"):
        GRPO(**{**SUMS, "model": str(model)})
    assert not marker.exists()


def test_nor_does_its_tokenizer(tmp_path, model, marker):
    folder = tmp_path / "own-tokenizer"
    shutil.copytree(resolve("tiny-sums").path, folder)
    shutil.copyfile(model / "own.py", folder / "own.py")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "OwnTokenizer"}
    config |= {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"trust_remote_code=True"):
        SharedBase.load(str(folder), device="cpu")
    assert not marker.exists()
    SharedBase.load(str(folder), device="cpu", trust_remote_code=True)
    assert marker.exists()
