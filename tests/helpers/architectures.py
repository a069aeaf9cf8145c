"""Tiny models that are not like a Llama: each breaks another habit of the common architecture."""

from functools import partial

import tiny
import torch
from transformers import (
    BartConfig,
    BertConfig,
    BloomConfig,
    DeepseekV4Config,
    DeepseekV32Config,
    FalconConfig,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    GraniteConfig,
    MixtralConfig,
    MptConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

WIDTHS = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": tiny.HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": tiny.CONTEXT,
    "pad_token_id": 0,
    "eos_token_id": tiny.EOS,
    "bos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}


def _build(config, changes, widths=WIDTHS, **sizes):
    """A model of a configuration's class; sizes of None are left to its defaults."""
    fields = {"vocab_size": tiny.VOCABULARY} | widths | sizes | changes
    return tiny.of(config(**{name: value for name, value in fields.items() if value is not None}))


def opt(**changes):
    """Flattens rows before its feed-forward, drops out by the word of the layer."""
    return _build(
        OPTConfig, changes, ffn_dim=48, word_embed_proj_dim=tiny.HIDDEN, dropout=0.0,
        num_key_value_heads=None, intermediate_size=None,
    )  # fmt: skip


def mpt(**changes):
    """Slopes its attention by columns of the cache, whatever position a token is said to have."""
    sizes = {"d_model": tiny.HIDDEN, "n_heads": 4, "n_layers": 2, "max_seq_len": tiny.CONTEXT}
    return _build(MptConfig, changes, sizes)


def bloom(**changes):
    """Slopes its attention by a mask of one dimension per row."""
    return _build(BloomConfig, changes, {"hidden_size": tiny.HIDDEN, "n_head": 4, "n_layer": 2})


def falcon(**changes):
    """Slopes its attention by the columns of its mask, in place of positions."""
    return _build(
        FalconConfig, changes, alibi=True, new_decoder_architecture=False,
        num_key_value_heads=None, intermediate_size=None,
    )  # fmt: skip


def gpt_neox(**changes):
    """Runs attention and feed-forward side by side, and turns a part of each head."""
    return _build(GPTNeoXConfig, changes, num_key_value_heads=None)


def qwen3(**changes):
    """Normalises queries and keys of each head."""
    return _with_norms(_build(Qwen3Config, changes, head_dim=8))


def smollm3(**changes):
    """One layer without rotary positions."""
    return _build(SmolLM3Config, changes, no_rope_layers=[1, 0], num_key_value_heads=4)


def granite(**changes):
    """Multiplies embeddings, scores, what each half of a layer adds, and logits."""
    return _build(
        GraniteConfig, changes, embedding_multiplier=3.0, attention_multiplier=0.5,
        residual_multiplier=0.6, logits_scaling=2.0,
    )  # fmt: skip


def olmo2(**changes):
    """Norms of all queries and all keys, and after each half of a layer."""
    return _with_norms(_build(Olmo2Config, changes))


def olmo3(**changes):
    """The same with windows, and rotary positions for each type of layer."""
    tables = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
    }
    model = _build(
        Olmo3Config, changes, num_key_value_heads=4, sliding_window=6, layer_types=list(tables),
        rope_parameters=tables,
    )  # fmt: skip
    return _with_norms(model)


def gemma(**changes):
    """Scales its embeddings, and adds 1 to the weights of its norms."""
    return _build(GemmaConfig, changes, head_dim=8)


def gpt_neo(**changes):
    """Every other layer sees a window, which it counts in columns."""
    sizes = {"hidden_size": tiny.HIDDEN, "max_position_embeddings": tiny.CONTEXT}
    return _build(
        GPTNeoConfig, changes, sizes, num_layers=2, num_heads=4, window_size=6,
        attention_types=[[["global", "local"], 1]],
    )  # fmt: skip


def bart(**changes):
    """The decoder of an encoder-decoder by itself, positions counted from the cache."""
    sizes = {"d_model": tiny.HIDDEN, "max_position_embeddings": tiny.CONTEXT, "is_decoder": True}
    return _build(
        BartConfig, changes, sizes, decoder_layers=2, encoder_layers=2,
        decoder_attention_heads=4, encoder_attention_heads=4, decoder_ffn_dim=48,
        encoder_ffn_dim=48,
    )  # fmt: skip


def bert(**changes):
    """An encoder, unless it is told to be a decoder."""
    return _build(BertConfig, changes, num_key_value_heads=None)


def gemma3(**changes):
    """Local and global layers by turns."""
    model = _build(
        Gemma3TextConfig, changes, head_dim=8, sliding_window=6, query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return _with_norms(model)


def mixtral(**changes):
    """Experts in one parameter, and no other feed-forward."""
    return _build(MixtralConfig, changes, num_local_experts=4, num_experts_per_tok=2)


def qwen3_moe(**changes):
    """Experts in one parameter behind names that used to be linear layers."""
    return _build(Qwen3MoeConfig, changes, **_EXPERTS)


def qwen2_moe(**changes):
    """Experts, and a shared one that gets its rows flattened."""
    return _build(Qwen2MoeConfig, changes, shared_expert_intermediate_size=24, **_EXPERTS)


def phi3(**changes):
    """Rotary frequencies that switch once a row is longer than 16 tokens."""
    table = {
        "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0] * 4,
        "long_factor": [4.0, 3.0, 2.0, 6.0], "original_max_position_embeddings": 16,
    }  # fmt: skip
    return _build(Phi3Config, changes, original_max_position_embeddings=16, rope_parameters=table)


#: An index that scores tokens, and attention with keys and values of low rank.
_INDEXED = {"index_head_dim": 8, "index_n_heads": 2}
_LOW_RANK = {
    "q_lora_rank": 12, "qk_rope_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip


def deepseek_v32(**changes):
    """Every token attends to the 12 that an index scores best."""
    return _build(
        DeepseekV32Config, changes, num_key_value_heads=4, n_group=1, topk_group=1,
        first_k_dense_replace=1, kv_lora_rank=16, qk_nope_head_dim=4, v_head_dim=8, index_topk=12,
        **_LOW_RANK, **_INDEXED,
    )  # fmt: skip


def deepseek_v4(**changes):
    """The index of one layer chooses among entries of four tokens each."""
    layers = "heavily_compressed", "compressed_sparse", "heavily_compressed"
    return _build(
        DeepseekV4Config, changes, intermediate_size=None, num_hidden_layers=3, head_dim=8,
        o_lora_rank=8, sliding_window=6, layer_types=[f"{kind}_attention" for kind in layers],
        mlp_layer_types=["hash_moe", "moe", "moe"], num_nextn_predict_layers=0, index_topk=3,
        **_LOW_RANK, **_INDEXED,
    )  # fmt: skip


def minimax_m3(**changes):
    """The index of one layer chooses two blocks of eight tokens."""
    return _build(
        MiniMaxM3VLTextConfig, changes, dense_intermediate_size=48, shared_intermediate_size=48,
        num_local_experts=4, num_experts_per_tok=2, head_dim=8, rotary_dim=4,
        layer_types=["minimax_m3_sparse", "full_attention"], index_block_size=8,
        index_topk_blocks=2, **_INDEXED,
    )  # fmt: skip


#: Members of the Llama family whose layers do more than those of Llama.
FAMILIES = {
    "qwen3": qwen3,
    "qwen3-window": partial(
        qwen3,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=0,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "smollm3": smollm3,
    "granite": granite,
    "mistral-window": partial(tiny.mistral, sliding_window=6),
    "olmo2": olmo2,
    "olmo3": olmo3,
    "gemma3": gemma3,
}


@torch.no_grad()
def _with_norms(model):
    """Change the weights of the norms, which are all alike when they are new."""
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    for index, weight in enumerate(norms):
        weight.add_(tiny.noise(weight.shape, 3000 + index) * 0.2)
    return model
