"""Architectures that are refused for what they are, each with what to use instead."""

import pytest
import tiny
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    T5Config,
    T5ForConditionalGeneration,
    XLMConfig,
    XLMWithLMHeadModel,
)

from evo_grpo.errors import ModelError
from evo_grpo.model.base import SharedBase


def llama4():
    config = Llama4TextConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=tiny.HIDDEN, intermediate_size=48,
        intermediate_size_mlp=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=tiny.CONTEXT,
        pad_token_id=0, eos_token_id=tiny.EOS, bos_token_id=2,
    )  # fmt: skip
    return Llama4ForCausalLM(config).eval()


class TestPartBelowTheHead:
    def test_of_another_name_than_the_model_says(self):
        with pytest.raises(
            ModelError,
            match=r"model Llama4ForCausalLM: expected .* under base_model_prefix, got "
            r"'language_model', which it does not have; set its base_model_prefix to 'model' where "
            r"you build it, or use a decoder-only language model of text$",
        ):
            SharedBase(llama4())

    def test_it_is_taken_once_it_is_named(self):
        model = llama4()
        model.base_model_prefix = "model"
        assert SharedBase(model).trunk is model.model

    def test_of_an_encoder_and_a_decoder(self):
        config = T5Config(
            vocab_size=tiny.VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4
        )
        with pytest.raises(
            ModelError,
            match=r"model T5ForConditionalGeneration: expected .*, got 'transformer', which it "
            r"does not have; use a decoder-only language model of text$",
        ):
            SharedBase(T5ForConditionalGeneration(config).eval())


def test_an_xlm_that_sees_both_ways():
    config = XLMConfig(
        vocab_size=tiny.VOCABULARY, emb_dim=32, n_layers=2, n_heads=4, pad_index=0,
        pad_token_id=0, eos_index=1, bos_index=2, max_position_embeddings=tiny.CONTEXT,
    )  # fmt: skip
    with pytest.raises(
        ModelError,
        match=r"model 'mine' \(XLMWithLMHeadModel\): expected a causal model, .*"
        r"load an encoder with is_decoder=True, or use a decoder-only language model$",
    ):
        SharedBase(XLMWithLMHeadModel(config).eval(), None, "mine")
