"""The size of a base model, against transformers, PEFT and gguf, and what is fetched for it."""

import json
import shutil
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from loopback_hub import QWEN3_4B, hub_in_use

from evo_grpo import run
from evo_grpo.errors import ModelError
from evo_grpo.model.files import read_header
from evo_grpo.settings import LoraSettings, from_dict
from evo_grpo.sources import embedded_models
from evo_grpo.training.sizing.model_size import (
    check_available,
    classifier_parameters,
    fetch_small_files,
    lora_parameters,
    read_model_size,
)
from evo_grpo.training.sizing.prompt_lengths import has_chat_template

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


@pytest.mark.parametrize("name", ["tiny-sums", "tiny-foods"])
def test_the_embedded_models_are_as_large_as_their_files_say(name: str, tmp_path: Path):
    # Of another architecture the headers of the safetensors are all that is known.
    source = embedded_models()[name]
    config = json.loads((source / "config.json").read_text())
    folder_of(tmp_path, **{**config, "model_type": "unheard_of"})
    shutil.copy(source / "model.safetensors", tmp_path)
    stored = read_model_size(str(tmp_path))
    assert stored.parameters == read_model_size(name).parameters == 453_216
    assert stored.linears == {}


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_match_transformers_and_peft(kind: str, tmp_path: Path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = folder_of(tmp_path, model_type=kind, **KINDS[kind])
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    shape = read_model_size(str(folder))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    for targets in ("all-linear", ["q_proj", "down_proj"], r".*layers\.1\..*_proj"):
        lora = LoraSettings(r=4, target_modules=targets)
        peft = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
        trained = sum(p.numel() for name, p in peft.named_parameters() if "lora_" in name)
        assert lora_parameters(shape, lora) == trained
        model = peft.unload()


def test_excluded_layers_and_ranks_of_single_layers_are_those_of_peft(tmp_path: Path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = folder_of(tmp_path, model_type="llama")
    size = read_model_size(str(folder))
    for given in (
        {"exclude_modules": ["down_proj"], "rank_pattern": {"q_proj": 2, r"layers\.1\..*": 3}},
        {"exclude_modules": r".*\.0\..*", "rank_pattern": {"v_proj": 7, r".*_proj": 2}},
    ):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        config = LoraConfig(r=4, target_modules="all-linear", **given)
        peft = get_peft_model(model, config)
        trained = sum(p.numel() for name, p in peft.named_parameters() if "lora_" in name)
        lora = LoraSettings(r=4, target_modules="all-linear", **given)
        assert lora_parameters(size, lora) == trained


def test_a_config_without_sizes_is_not_guessed(tmp_path: Path):
    folder = folder_of(tmp_path)
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 16}')
    assert read_model_size(str(folder)).parameters is None


def test_a_gguf_file_is_read_by_its_header(tmp_path: Path):
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
    shape = read_model_size(str(file))
    assert (shape.architecture, shape.parameters, shape.context) == ("llama", 528, 64)
    assert lora_parameters(shape, LoraSettings(r=1)) == (
        2 * (16 + 16) + 2 * (16 + 8) + 3 * (16 + 40)
    )
    assert agrees_with_the_package(file)
    whole = file.read_bytes()
    for length in (0, 3, 4, 10, 23, 60, whole.index(b"two words"), len(whole) // 2, 2100):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="not a complete GGUF file"):
            read_model_size(str(file))
    # A count that no file can hold.
    file.write_bytes(whole.replace(struct.pack("<IQ", 8, 4), struct.pack("<IQ", 8, 2**63), 1))
    with pytest.raises(ModelError, match="its header is truncated"):
        read_model_size(str(file))


def agrees_with_the_package(file: Path) -> bool:
    reader = gguf.GGUFReader(str(file))
    header = read_header(file, gguf.GGML_QUANT_SIZES)
    assert header.shapes == {t.name: tuple(map(int, t.shape)) for t in reader.tensors}
    return all(
        value is None or value == reader.get_field(key).contents()
        for key, value in header.values.items()
    )


def test_a_gguf_file_of_the_other_byte_order(tmp_path: Path):
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(file), "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_context_length(64)
    writer.add_tensor("token_embd.weight", np.zeros((32, 16), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shape = read_model_size(str(file))
    assert (shape.architecture, shape.parameters, shape.context) == ("llama", 512, 64)


def test_a_hub_model_that_is_not_here_is_not_guessed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    shape = read_model_size("nobody/nothing")
    assert shape.parameters is None
    assert "unknown until it is downloaded" in shape.note


def stored(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
UNKNOWN = {"model_type": "unheard_of"}
COUNT = r"layers: expected an integer of at most 10,000, got "
HEADER = r"model\.safetensors is not a complete safetensors file: "


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        (b"{", None, "cannot be read as JSON"),
        (b"[]", None, "expected an object in"),
        (None, None, r"holds no config\.json"),
        ({"model_type": "llama", "num_hidden_layers": 100_000_000}, None, COUNT),
        (
            {"model_type": "llama", "num_hidden_layers": 0},
            None,
            "layers: expected a layer or more, got 0",
        ),
        # Counts of any architecture and part.
        (UNKNOWN | {"num_hidden_layers": 4.0}, None, COUNT),
        (UNKNOWN | {"encoder_layers": 20_000}, None, COUNT),
        (UNKNOWN | {"text_config": {"decoder": {"num_layers": 20_000}}}, None, COUNT),
        (UNKNOWN, b"\xff" * 16, HEADER),
        (UNKNOWN, stored([]), HEADER),
        (UNKNOWN, stored({"a": TENSOR | {"shape": [-2]}}, bytes(8)), HEADER),
        (UNKNOWN, stored({"a": TENSOR | {"shape": [2**40, 2**40]}}, bytes(8)), HEADER),
        (UNKNOWN, stored({"a": TENSOR}, bytes(4)), HEADER),  # a file that was cut off
    ],
)
def test_damaged_model_folders_are_refused_by_file_and_key(tmp_path, config, weights, message):
    if config is not None:
        text = config if isinstance(config, bytes) else json.dumps({**BASE, **config}).encode()
        (tmp_path / "config.json").write_bytes(text)
    if weights is not None:
        (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(ModelError, match=message):
        read_model_size(str(tmp_path))


def test_missing_models_are_refused(tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(b"no gguf at all, but long enough to be read")
    with pytest.raises(ModelError, match="not a complete GGUF file"):
        read_model_size(str(tmp_path / "m.gguf"))
    with pytest.raises(ModelError, match="neither an embedded model"):
        read_model_size("tiny-sum")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("with_weights", [False, True])
def test_a_classifier_has_an_output_per_label_in_place_of_the_head(tied, with_weights, tmp_path):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(
        "qwen2", **BASE, tie_word_embeddings=tied, num_labels=3, pad_token_id=0
    )
    model = AutoModelForSequenceClassification.from_config(config)
    (model if with_weights else config).save_pretrained(tmp_path)
    made = sum(parameter.numel() for parameter in model.parameters())
    assert classifier_parameters(str(tmp_path)) == made


def test_a_classifier_of_unknown_layers_is_known_with_its_weights(tmp_path):
    from transformers import BertConfig, BertForSequenceClassification

    shape = {name: BASE[name] for name in BASE if name != "num_key_value_heads"}
    model = BertForSequenceClassification(BertConfig(**shape))
    model.config.save_pretrained(tmp_path)
    assert classifier_parameters(str(tmp_path)) is None
    model.save_pretrained(tmp_path)
    made = sum(parameter.numel() for parameter in model.parameters())
    assert classifier_parameters(str(tmp_path)) == made


# --- small files of hub models

MODELS = {
    "owner/qwen": {
        "config.json": json.dumps(QWEN3_4B).encode(),
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors": b"eight gigabytes",
    },
    "owner/no-config": {"adapter_config.json": b"{}"},
    "owner/gated": {},
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub on the loopback address and an empty cache; the paths that were asked for."""
    with hub_in_use(MODELS, tmp_path / "hub", monkeypatch) as asked:
        yield asked


def test_the_size_of_a_hub_model_is_known_without_its_weights(hub):
    assert read_model_size("owner/qwen").parameters is None
    assert fetch_small_files("owner/qwen") is None
    size = read_model_size("owner/qwen")
    assert (size.parameters, size.context) == (4_022_468_096, 40960)
    assert has_chat_template("owner/qwen") is True
    assert not any("safetensors" in path for path in hub)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("owner/none", r"has no such id, or a private one; correct it"),
        ("owner/gated", r"accept its terms on http.*/owner/gated"),
        ("owner/no-config", r"expected a config.json on the hub, found none"),
        ("owner/a b", r"expected a hub id owner/name"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_a_refused_model_is_named_with_the_remedy(name, message):
    # Both ask the hub in one way: once is enough for the second.
    for asks in (fetch_small_files, *([check_available] if name == "owner/gated" else [])):
        with pytest.raises(ModelError, match=f"^model '{name}': .*{message}"):
            asks(name)


def test_a_hub_that_is_not_there_is_one_line_and_ends_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    config = from_dict({"model": "owner/qwen", "env": "sums"})
    with pytest.raises(ModelError, match=r"127.0.0.1:9 cannot be reached: .*weights are not in"):
        run(config, out=tmp_path / "run")
    assert time.monotonic() - start < 5
    assert not (tmp_path / "run").exists()
