"""What is fetched of a hub model before a run, and what is said where it cannot be fetched."""

import json
import time

import pytest
from loopback_hub import QWEN3_4B, hub_in_use

from evo_grpo import run
from evo_grpo.errors import ModelError
from evo_grpo.settings import from_dict
from evo_grpo.training.sizing.model_size import (
    check_available,
    fetch_small_files,
    read_model_size,
)
from evo_grpo.training.sizing.prompt_lengths import has_chat_template

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
