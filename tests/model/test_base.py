import json
import shutil
from inspect import Parameter, Signature
from pathlib import Path
from types import SimpleNamespace

import architectures
import pytest
import tiny
import torch
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    Gemma2Config,
    RecurrentGemmaConfig,
    WhisperConfig,
    WhisperForCausalLM,
    xLSTMConfig,
)

from evo_grpo.errors import ModelError
from evo_grpo.model import base as base_module
from evo_grpo.model.base import SharedBase, pick_device
from evo_grpo.sources import embedded_models


@pytest.fixture
def folder(tmp_path):
    """A copy of tiny-sums that a test may damage."""
    target = tmp_path / "model"
    shutil.copytree(embedded_models()["tiny-sums"], target)
    return target


def with_keys(**changes):
    return lambda data: json.dumps(json.loads(data) | changes).encode()


class TestLoad:
    def test_embedded(self, sums_base):
        assert sums_base.name == "tiny-sums"
        assert sums_base.dtype == torch.float32
        assert (sums_base.context_length, sums_base.vocabulary) == (512, 104)
        assert sums_base.tokenizer("12+07=").input_ids
        assert not any(p.requires_grad for p in sums_base.model.parameters())
        assert not sums_base.model.training

    def test_a_dtype_by_name(self, folder):
        for dtype in ("bfloat16", "float16"):
            base = SharedBase.load(str(folder), device="cpu", dtype=dtype)
            assert base.dtype == getattr(torch, dtype)
        with pytest.raises(
            ModelError, match=r"dtype: expected auto, float32, bfloat16, float16, go"
        ):
            SharedBase.load("tiny-sums", device="cpu", dtype="fp16")

    def test_the_callers_tokenizer(self, folder):
        own = object()
        (folder / "tokenizer.json").unlink()
        assert SharedBase.load(str(folder), device="cpu", tokenizer=own).tokenizer is own

    def test_shows_no_progress_bar_and_leaves_the_setting(self, folder, capfd):
        from transformers.utils import logging

        shown = logging.is_progress_bar_enabled()
        SharedBase.load(str(folder), device="cpu")
        assert capfd.readouterr() == ("", "")
        assert logging.is_progress_bar_enabled() == shown

    @pytest.mark.parametrize("broken", [float("nan"), float("inf")])
    def test_weights_that_are_not_finite(self, folder, broken):
        file = folder / "model.safetensors"
        weights = load_file(file)
        weights["model.layers.1.mlp.down_proj.weight"][3, 2] = broken
        save_file(weights, file, {"format": "pt"})
        with pytest.raises(ModelError, match=r"1 of the .* its weight model.layers.1.mlp.down_pro"):
            SharedBase.load(str(folder), device="cpu")

    @pytest.mark.parametrize(
        ("file", "change"),
        [
            *(("model.safetensors", lambda data, n=n: data[:n]) for n in (0, 100, 10_000)),
            *(("config.json", lambda _, text=text: text) for text in (b"{", b"[]", b"{}")),
            ("config.json", lambda _: b'{"model_type": "nonsense"}'),
            ("config.json", with_keys(model_type="t5")),
            ("config.json", with_keys(intermediate_size=64)),
            # Weights that would be random.
            ("config.json", with_keys(num_hidden_layers=5)),
            ("config.json", with_keys(num_hidden_layers=0)),
            ("config.json", with_keys(tie_word_embeddings=False)),
            ("tokenizer.json", lambda _: b"{"),
        ],
    )
    def test_damaged_files_are_refused_by_name(self, folder, file, change):
        (folder / file).write_bytes(change((folder / file).read_bytes()))
        with pytest.raises(ModelError, match=r"^model '.*'(:| cannot be loaded from) ") as caught:
            SharedBase.load(str(folder), device="cpu")
        assert str(folder) in str(caught.value)

    @pytest.mark.filterwarnings("ignore:Detected pickle protocol")
    @pytest.mark.parametrize("data", [b"", b"\x80\x04garbage"])
    def test_a_foreign_pytorch_model_bin_is_named(self, folder, data):
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(data)
        with pytest.raises(ModelError, match="cannot be loaded from"):
            SharedBase.load(str(folder), device="cpu")

    def test_an_unknown_hub_id(self, monkeypatch):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(ModelError, match="; a hub id needs the network or a warm cache: "):
            SharedBase.load("nobody/nothing", device="cpu")


class TestGguf:
    def test_a_file_of_ones_own(self, tmp_path, capfd):
        """A Llama written as GGUF by the reader's own package gives the logits it had."""
        model = tiny.llama(tie_word_embeddings=True)
        file = tmp_path / "tiny.gguf"
        write_gguf(model, file)
        capfd.readouterr()
        base = SharedBase.load(str(file), device="cpu", tokenizer=object())
        assert capfd.readouterr().err == ""  # no progress bar
        input_ids = tiny.ids(2, 6)
        with torch.no_grad():
            expected = model(input_ids=input_ids).logits
            got = base.logits(base.hidden(input_ids))
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)

        # A saved copy is a model of floats: vLLM refuses the quantisation of the file.
        base.tokenizer = None
        base.save(tmp_path / "saved")
        assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()

    def test_no_gguf(self, tmp_path):
        (tmp_path / "bad.gguf").write_bytes(b"GGUF nonsense")
        with pytest.raises(ModelError, match=r"bad.gguf is not a complete GGUF file: exp"):
            SharedBase.load(str(tmp_path / "bad.gguf"), device="cpu", tokenizer=object())


class TestIds:
    def test_every_end_token_counts_once_the_tokenizers_first(self, llama):
        llama.generation_config.eos_token_id = [1, 7]
        llama.config.eos_token_id = [7, 8]
        base = SharedBase(llama, tiny.FakeTokenizer(eos_token_id=5, pad_token_id=None))
        assert base.eos_ids == (5, 1, 7, 8)
        assert base.pad_id == 5

    def test_no_end_token_at_all_or_id_zero(self, llama):
        for number, ids in ((None, ()), (0, (0,))):
            llama.generation_config.eos_token_id = llama.config.eos_token_id = number
            base = SharedBase(llama)
            assert (base.eos_ids, base.pad_id) == (ids, 0)
        tokenizer = tiny.FakeTokenizer(eos_token_id=3, pad_token_id=0)
        assert SharedBase(llama, tokenizer).pad_id == 0

    def test_set_padding(self, llama):
        tokenizer = tiny.FakeTokenizer(eos_token_id=1, pad_token_id=None, pad_token=None)
        base = SharedBase(llama, tokenizer)
        base.set_padding(6, "<fill>")
        assert (base.pad_id, tokenizer.pad_token) == (6, "<fill>")
        for bad in (-1, tiny.VOCABULARY):
            with pytest.raises(
                ModelError, match=rf"expected an id in \[0, 40\) of '.*', got {bad}"
            ):
                base.set_padding(bad)


class TestRefusedModels:
    def test_logits_divided_by_zero(self):
        model = architectures.granite()
        model.config.logits_scaling = 0
        with pytest.raises(ModelError, match=r"logits_scaling: expected a number other than 0"):
            SharedBase(model)


class TestDevice:
    def test_auto_takes_cuda_when_there_is_one(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert pick_device("auto").type == "cuda"
        assert pick_device("cuda:1") == torch.device("cuda", 1)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")

    @pytest.mark.parametrize(
        ("device", "message"),
        [
            ("cuda:0", r"'cuda:0' asked for, but torch finds no CUDA device; use auto or cpu \(en"),
            ("mps", r"'mps' asked for, .* no MPS device; use"),
            ("gpu", r"expected auto, .* cuda:N, got 'gpu'"),
        ],
    )
    def test_a_device_that_is_not_there(self, device, message, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        with pytest.raises(ModelError, match=f"^device: {message}"):
            pick_device(device)


class TestSave:
    @pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2, tiny.qwen2])
    def test_round_trip_with_adapters_on_it(self, build, tmp_path):
        slots = tiny.population(build())
        slots.base.save(tmp_path / "base")
        plain = build()
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        want, got = plain.state_dict(), theirs.state_dict()
        assert want.keys() == got.keys()
        assert all(torch.equal(want[key], got[key]) for key in want)
        slots.base.check_same(tmp_path / "base")

    def test_after_a_rollout_joined_the_weights(self, tmp_path):
        from evo_grpo.rollout.engine import RolloutRequest
        from evo_grpo.rollout.native.native_engine import NativeEngine
        from evo_grpo.rollout.sampling import Sampling
        from evo_grpo.types import Prompt

        slots = tiny.population(tiny.llama())
        request = RolloutRequest(
            0, "a0", [Prompt(0, "", (4, 5))], 2, Sampling(max_output_tokens=2), 1
        )
        NativeEngine(slots).rollout([request])
        slots.base.save(tmp_path / "base")
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
        want = tiny.llama().state_dict()
        assert all(torch.equal(want[key], theirs[key]) for key in want)

    def test_the_tokenizer_comes_along(self, tmp_path, sums_base):
        sums_base.save(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        assert tokenizer("1+2=").input_ids == sums_base.tokenizer("1+2=").input_ids
        sums_base.check_same(tmp_path)

    def test_another_base_is_noticed(self, tmp_path):
        SharedBase(tiny.llama(1)).save(tmp_path / "one")
        base = SharedBase(tiny.llama(2), name="two")
        with pytest.raises(
            ModelError, match=r"its base model is not 'two', and loading it would ch"
        ):
            base.check_same(tmp_path / "one")
        SharedBase(tiny.llama(2, num_hidden_layers=1)).save(tmp_path / "small")
        with pytest.raises(ModelError, match="its base model is not 'two'"):
            base.check_same(Path(tmp_path / "small"))


class TestMicroBatchTokens:
    def test_a_small_model_takes_the_most_and_a_large_one_the_least(self, monkeypatch):
        model = tiny.llama()
        assert SharedBase(model).micro_batch_tokens == base_module.CPU_TOKENS[1]
        monkeypatch.setattr(base_module, "ACTIVATION_BYTES", 1)
        assert SharedBase(model).micro_batch_tokens == base_module.CPU_TOKENS[0]

    @pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
    def test_it_counts_inputs_and_outputs_of_the_layers_and_no_embedding(self, build, monkeypatch):
        base = SharedBase(build())
        features = sum(
            sum(weight.shape)
            for name, weight in base.trunk.named_parameters()
            if weight.ndim == 2 and "embed" not in name and "wte" not in name and "wpe" not in name
        )
        monkeypatch.setattr(base_module, "ACTIVATION_BYTES", 4 * features * 3000)
        assert base.micro_batch_tokens == 3000


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(
            vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, pad_token_id=0,
            eos_token_id=1, bos_token_id=2, final_logit_softcapping=0.5,
        ),
        RecurrentGemmaConfig(
            vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2, lru_width=32,
            num_attention_heads=2, head_dim=16, block_types=["recurrent", "attention"],
            pad_token_id=0, eos_token_id=1, bos_token_id=2, logits_soft_cap=0.5,
        ),
        xLSTMConfig(
            vocab_size=40, hidden_size=64, num_heads=4, num_hidden_layers=1, qk_dim_factor=1.0,
            chunk_size=8, pad_token_id=0, eos_token_id=1, bos_token_id=2, output_logit_soft_cap=0.5,
        ),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_logits_are_capped_by_whatever_name_a_config_has_for_it(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.get_output_embeddings().weight.data.mul_(20)
    base = SharedBase(model)
    assert base.softcap == 0.5
    ids = tiny.ids(1, 5)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        assert expected.abs().max() > 0.4
        torch.testing.assert_close(base.logits(base.hidden(ids)), expected)


class TestContext:
    def test_it_is_known_by_every_name_that_configs_have(self):
        whisper = WhisperConfig(
            vocab_size=tiny.VOCABULARY, d_model=tiny.HIDDEN, decoder_layers=1, encoder_layers=1,
            decoder_attention_heads=4, encoder_attention_heads=4, decoder_ffn_dim=48,
            encoder_ffn_dim=48, max_target_positions=24, pad_token_id=0, bos_token_id=2,
            eos_token_id=tiny.EOS, decoder_start_token_id=2,
        )  # fmt: skip
        torch.manual_seed(0)
        assert SharedBase(WhisperForCausalLM(whisper).eval()).context_length == 24
        assert SharedBase(architectures.mpt()).context_length == tiny.CONTEXT
        assert SharedBase(architectures.bloom()).context_length == 0


@pytest.mark.parametrize("name", ["cache", "cache_params", "past_key_values"])
def test_a_cache_is_passed_by_the_name_that_the_model_has(name, monkeypatch):
    """transformers 5.24 renames past_key_values."""
    base = SharedBase.load("tiny-sums", device="cpu", dtype="float32")
    given = {}

    def forward(input_ids=None, use_cache=None, **own):
        given.update(own, use_cache=use_cache)
        return SimpleNamespace(last_hidden_state=input_ids)

    names = ("input_ids", "use_cache", name)
    parameters = [Parameter(one, Parameter.KEYWORD_ONLY) for one in names]
    forward.__signature__ = Signature(parameters)
    monkeypatch.setattr(base.trunk, "forward", forward)
    cache = DynamicCache()
    base.run(cache, input_ids=torch.tensor([[3]]))
    assert given == {name: cache, "use_cache": True}
