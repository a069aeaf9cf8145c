"""Experts that no linear layer holds are found by what they are, and nothing else is."""

import architectures
import pytest
import tiny
from transformers import (
    DbrxConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
)

from evo_grpo.model.base import SharedBase
from evo_grpo.model.lora.targets import expert_modules

WIDTHS = architectures.WIDTHS | {"head_dim": 8}


def gpt_oss():
    return tiny.of(GptOssConfig(**WIDTHS, num_local_experts=4, num_experts_per_tok=2))


def dbrx():
    """Experts of a layer in one matrix, below one another."""
    config = DbrxConfig(
        vocab_size=tiny.VOCABULARY, d_model=tiny.HIDDEN, n_heads=4, n_layers=2,
        max_seq_len=tiny.CONTEXT, eos_token_id=tiny.EOS, pad_token_id=0,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        # Older releases of transformers run with this width alone.
        ffn_config={"ffn_hidden_size": tiny.HIDDEN, "moe_num_experts": 4, "moe_top_k": 2},
    )  # fmt: skip
    return tiny.of(config)


def lfm2():
    """A convolution, whose weight has three dimensions."""
    return tiny.of(Lfm2Config(**WIDTHS, layer_types=["conv", "full_attention"]))


def base_of(model):
    return SharedBase(model, None, "tiny")


NONE = {"lfm2": lfm2, "llama": tiny.llama}


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (architectures.qwen2_moe, "model.layers.{}.mlp.experts"),
        (gpt_oss, "model.layers.{}.mlp.experts"),
        (dbrx, "transformer.blocks.{}.ffn.experts.mlp"),
    ],
)
def test_stacked_experts_are_found_in_every_layer(build, names):
    assert expert_modules(base_of(build())) == {names.format(layer) for layer in (0, 1)}


@pytest.mark.parametrize("name", NONE)
def test_other_weights_of_three_dimensions_are_none(name):
    model = NONE[name]()
    stacked = [p for p in model.parameters() if p.ndim > 2]
    assert bool(stacked) == (name != "llama"), "the model shows what it is here for"
    assert expert_modules(base_of(model)) == frozenset()


def test_a_module_of_linear_layers_is_none():
    """Experts that are layers of their own can carry adapters, or are named one by one."""
    model = tiny.of(LlamaConfig(**WIDTHS))
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("Experts", (type(mlp),), {})
    assert expert_modules(base_of(model)) == frozenset()
