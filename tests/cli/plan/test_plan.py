import io
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from rich.console import Console

from evo_grpo.cli.plan import make_plan
from evo_grpo.cli.plan.gguf_header import read_header
from evo_grpo.cli.plan.shapes import lora_parameters, read_shape
from evo_grpo.cli.plan.show import show_plan
from evo_grpo.cli.plan.text import size
from evo_grpo.errors import ConfigError, DataError, EngineUnavailable, ModelError
from evo_grpo.settings import LoraSettings, from_dict, load
from evo_grpo.sources import embedded_models

ROOT = Path(__file__).resolve().parents[3]
MINIMAL = {"model": "tiny-sums", "env": "sums"}
BASE = {
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
KINDS = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 8},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
}


def folder_of(path: Path, **config: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**BASE, **config}))
    return path


# --- rows and tokens -----------------------------------------------------------------------------


def test_rows_and_tokens_are_upper_bounds_over_the_range_of_group_size():
    overrides = [
        "population={size: 4, rounds: 3, steps_per_round: 5}",
        "algorithm={prompts_per_step: 2, group_size: 6}",
        "evolve.hyperparameters={group_size: {min: 4, max: 10}}",
        "evolve.fitness={prompts: 20, samples: 2, test_prompts: 30, test_samples: 3}",
    ]
    plan = make_plan(from_dict(MINIMAL, overrides))
    assert plan.group_sizes == (4, 10)
    assert plan.max_output_tokens == 4  # the hint of the task
    assert plan.rows_per_step == 4 * 2 * 10
    assert plan.tokens_per_round == 5 * 80 * 4
    assert plan.evaluation_tokens == 4 * 20 * 2 * 4
    assert plan.test_tokens == 2 * 30 * 3 * 4
    assert plan.total_tokens == 3 * (1600 + 640) + 720
    assert plan.rows == {"train": 9000, "validation": 500, "test": 500}


def test_evaluations_take_no_more_prompts_than_there_are():
    overrides = ["env.args={validation_size: 10, test_size: 7}"]
    plan = make_plan(from_dict(MINIMAL, overrides))
    assert plan.evaluation_tokens == 8 * 10 * 4
    assert plan.test_tokens == 2 * 7 * 4 * 4
    assert "evolve.fitness.prompts is 64, but validation has 10 rows" in plan.warnings
    assert "evolve.fitness.test_prompts is 256, but test has 7 rows" in plan.warnings


def test_a_context_without_room_for_a_prompt_is_warned_of():
    (text,) = make_plan(
        load(ROOT / "population.yaml", ["algorithm.max_output_tokens=512"])
    ).warnings
    assert "no room for a prompt in a context of 512" in text


GAME = """
class Echo:
    def reset(self, *, seed=None):
        return "say a", {}

    def step(self, action):
        return "say a", float(action == "a"), False, False, {}
"""


def test_a_game_has_turns_and_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "echo_game.py").write_text(GAME)
    monkeypatch.chdir(tmp_path)
    env = {"kind": "python:echo_game:Echo", "max_turns": 3}
    overrides = ["algorithm.max_output_tokens=5", "evolve.fitness={test_prompts: 10}"]
    plan = make_plan(from_dict({"model": "tiny-sums", "env": env}, overrides))
    assert (plan.rows, plan.turns) == ({}, 3)
    assert plan.tokens_per_round == 4 * 8 * 4 * 8 * 5 * 3
    assert plan.evaluation_tokens == 8 * 64 * 5 * 3
    assert plan.test_tokens == 2 * 10 * 4 * 5 * 3
    console = Console(width=200, file=io.StringIO())
    console.print(show_plan(plan, "echo.yaml"))
    text = console.file.getvalue()
    assert "python:echo_game:Echo: episodes of at most 3 turns" in text
    assert "of at most 5 tokens in each of 3 turns" in text


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-sums", "tiny-foods"])
def test_the_embedded_models_are_as_large_as_their_files_say(name: str, tmp_path: Path):
    # Of another architecture the headers of the safetensors are all that is known.
    source = embedded_models()[name]
    config = json.loads((source / "config.json").read_text())
    folder_of(tmp_path, **{**config, "model_type": "unheard_of"})
    shutil.copy(source / "model.safetensors", tmp_path)
    stored = read_shape(str(tmp_path))
    assert stored.parameters == read_shape(name).parameters == 453_216
    assert stored.linears == {}


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_match_transformers_and_peft(kind: str, tmp_path: Path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = folder_of(tmp_path, model_type=kind, **KINDS[kind])
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    shape = read_shape(str(folder))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    for targets in ("all-linear", ["q_proj", "down_proj"], r".*layers\.1\..*_proj"):
        lora = LoraSettings(r=4, target_modules=targets)
        peft = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
        trained = sum(p.numel() for name, p in peft.named_parameters() if "lora_" in name)
        assert lora_parameters(shape, lora) == trained
        model = peft.unload()


def test_bytes_are_those_of_adapter_gradient_and_adam():
    plan = make_plan(from_dict(MINIMAL, ["population.size=3", "population.rounds=2"]))
    assert plan.adapter_parameters == 58_368
    assert plan.bytes_per_agent == 58_368 * 16
    assert plan.base_bytes == {"float32": 453_216 * 4, "bfloat16": 453_216 * 2}
    assert plan.checkpoint_bytes == 2 * 3 * 58_368 * 12
    last = from_dict(MINIMAL, ["record.checkpoints=last", "engine.dtype=float16"])
    assert make_plan(last).checkpoint_bytes == 8 * 58_368 * 12
    assert make_plan(last).base_bytes == {"float16": 453_216 * 2}


def test_an_unknown_architecture_is_not_guessed(tmp_path: Path):
    plan = make_plan(from_dict({**MINIMAL, "model": str(folder_of(tmp_path, model_type="mamba"))}))
    assert plan.base.parameters is None
    assert plan.adapter_parameters is None
    assert plan.bytes_per_agent is plan.checkpoint_bytes is None
    assert plan.base.note == "the layers of architecture 'mamba' are not known here"


def test_a_config_without_sizes_is_not_guessed(tmp_path: Path):
    folder = folder_of(tmp_path, model_type="llama", hidden_size=None)
    assert read_shape(str(folder)).parameters is None


def test_a_gguf_file_is_read_by_its_header(tmp_path: Path):
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(40)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_token_list(["a", "", "two words", "ä"])
    writer.add_token_scores([0.0, -1.0, -2.0, -3.0])
    writer.add_array("nested", [[1, 2], [3, 4]])
    writer.add_context_length(64)
    writer.add_bool("flag", True)
    writer.add_tensor("token_embd.weight", np.zeros((32, 16), np.float32))
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(16, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shape = read_shape(str(file))
    assert (shape.architecture, shape.parameters, shape.context) == ("llama", 528, 64)
    assert lora_parameters(shape, LoraSettings(r=1)) == (
        2 * (16 + 16) + 2 * (16 + 8) + 3 * (16 + 40)
    )
    assert agrees_with_the_package(gguf, file)
    whole = file.read_bytes()
    for length in (0, 3, 4, 10, 23, 60, whole.index(b"two words"), len(whole) // 2, 2100):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="no complete GGUF file"):
            read_shape(str(file))
    # A count that no file can hold.
    file.write_bytes(whole.replace(struct.pack("<IQ", 8, 4), struct.pack("<IQ", 8, 2**63), 1))
    with pytest.raises(ModelError, match="its header is cut off"):
        read_shape(str(file))


def agrees_with_the_package(gguf: ModuleType, file: Path) -> bool:
    reader = gguf.GGUFReader(str(file))
    header = read_header(file, gguf.GGML_QUANT_SIZES)
    assert header.shapes == {t.name: tuple(map(int, t.shape)) for t in reader.tensors}
    return all(
        value is None or value == reader.get_field(key).contents()
        for key, value in header.values.items()
    )


def test_a_gguf_file_of_the_other_byte_order(tmp_path: Path):
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(file), "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_context_length(64)
    writer.add_tensor("token_embd.weight", np.zeros((32, 16), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shape = read_shape(str(file))
    assert (shape.architecture, shape.parameters, shape.context) == ("llama", 512, 64)


def test_a_gguf_file_without_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(EngineUnavailable, match=r'pip install "evo-grpo\[smollm2\]"'):
        read_shape(str(tmp_path / "m.gguf"))


def test_a_hub_model_that_is_not_here_is_not_guessed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    shape = read_shape("nobody/nothing")
    assert shape.parameters is None
    assert "unknown until it is downloaded" in shape.note


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", "cannot be read as JSON"),
        ("config.json", b"[]", "expected a model_type"),
        ("model.safetensors", b"\xff" * 16, "no complete safetensors file"),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0[]", "no complete safetensors file"),
    ],
)
def test_damaged_model_folders(tmp_path: Path, name: str, content: bytes, message: str):
    folder_of(tmp_path, model_type="unheard_of")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_shape(str(tmp_path))


def test_damaged_and_missing_models(tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(b"no gguf at all, but long enough to be read")
    with pytest.raises(ModelError, match="no complete GGUF file"):
        read_shape(str(tmp_path / "m.gguf"))
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        read_shape(str(tmp_path))
    with pytest.raises(ModelError, match="neither an embedded model"):
        read_shape("tiny-sum")


def test_target_modules_that_match_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"target_modules: \['qproj'\] matches no layer of tiny-"):
        make_plan(from_dict(MINIMAL, ["model.lora.target_modules=[qproj]"]))


# --- order and cost ------------------------------------------------------------------------------


def test_the_task_is_looked_at_before_the_model(tmp_path: Path):
    rows = tmp_path / "rows.csv"
    rows.write_text("question,answer\n")
    settings = {
        "model": "no/such/model",
        "env": {"kind": "dataset", "train": str(rows), "reward": "operator:eq"},
    }
    with pytest.raises((DataError, ConfigError)) as caught:
        make_plan(from_dict(settings))
    assert "model" not in str(caught.value)


def test_a_plan_loads_nothing_heavy():
    code = (
        "import sys\n"
        "from evo_grpo.settings import load\n"
        "from evo_grpo.cli.plan import make_plan\n"
        "make_plan(load('population.yaml'))\n"
        "heavy = {'torch', 'transformers', 'peft', 'pandas', 'optuna', 'datasets'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1_000, "1.0 kB"),
        (933_888, "934 kB"),
        (1_812_864, "1.8 MB"),
        (538_060_032, "538 MB"),
        (3_200_000_000_000, "3.2 TB"),
    ],
)
def test_sizes_are_short(count: int, text: str):
    assert size(count) == text
