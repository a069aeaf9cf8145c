"""A configuration of a few thousand weights for any architecture of transformers.

Sizes are found by the names of their fields, which architectures share; `OVERRIDES` holds what is
particular. Every dropout is on, since a base must not drop out whatever its configuration says, and
local attention reaches less far than the rows of the sweep are long.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.musicgen.configuration_musicgen import MusicgenDecoderConfig
from transformers.models.musicgen_melody.configuration_musicgen_melody import (
    MusicgenMelodyDecoderConfig,
)

VOCABULARY = 48
HEADS, HEAD_DIM, HIDDEN = 4, 8, 32
WINDOW = 6
CONTEXT = 64

SIZES: dict[str, Any] = {
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "dim",
            "embedding_size",
            "word_embed_proj_dim",
            "embed_dim",
            "hidden_size_per_layer_input",
            "lru_width",
            "cross_attention_hidden_size",
            "index_hidden_size",
        ),
        HIDDEN,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "n_inner",
            "dim_ff",
            "ffn_hidden_size",
            "d_inner",
            "dff",
            "feed_forward_size",
            "shared_intermediate_size",
            "mlp_hidden_size",
            "dense_intermediate_size",
        ),
        48,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "expert_ffn_hidden_size",
            "router_hidden_size",
            "intermediate_size_mlp",
            "moe_shared_intermediate_size",
        ),
        16,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "decoder_layers",
            "encoder_layers",
            "num_encoder_layers",
            "num_decoder_layers",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
            "num_encoder_attention_heads",
            "num_decoder_attention_heads",
            "swa_num_attention_heads",
        ),
        HEADS,
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2
    ),
    **dict.fromkeys(
        ("head_dim", "attention_head_dim", "d_kv", "v_head_dim", "global_head_dim", "dim_head"),
        HEAD_DIM,
    ),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "nope_head_dim", "rope_head_dim"), 4),
    "qk_head_dim": 8,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "o_lora_rank": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    # Of rows of sixteen tokens, which no row of the sweep outgrows, all are taken.
    "index_topk": 16,
    "index_block_size": 4,
    "index_topk_blocks": 4,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "rotary_dim": 4,
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "attention_chunk_size": WINDOW,
    "sliding_window": WINDOW,
    "window_size": WINDOW,
    "attention_window_size": WINDOW,
    "local_attention": 2 * WINDOW,
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"),
        CONTEXT,
    ),
    "initializer_range": 0.2,
    "is_decoder": True,
    "type_vocab_size": 2,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "decoder_start_token_id": 2,
    "num_codebooks": 2,
    "image_size": 16,
    "patch_size": 8,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
}
#: Selected keys are fewer than a row of the sweep is long, and layers remember n-grams.
QWEN4: dict[str, Any] = {
    "hc_count": 2,
    "hc_lowrank": 8,
    "ple_layer_ids": [1],
    "ple_embed_dim": HIDDEN,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "heads_per_ngram": 4,
    "split_ngram_parts": 1,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
#: What is particular, by model type; a value of None leaves the field out.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "vocab_size": VOCABULARY,
        "encoder_hash_byte_group_vocab": 64,
        # Its cache asks for them, and BltConfig has none.
        "num_hidden_layers": 2,
        "local_attention_window_len": WINDOW,
        "patcher_config": {"intermediate_size": 48},
        "encoder_config": {"hidden_size_global": 2 * HIDDEN},
        "decoder_config": {"hidden_size_global": 2 * HIDDEN},
        "global_config": {"hidden_size": 2 * HIDDEN, "head_dim": 2 * HEAD_DIM},
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    # Four tokens in one entry.
    "deepseek_v4": {"index_topk": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "attn_pdrop": 0.1, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "diffllama": {"attention_dropout": 0.0},
    "dots3_note": {
        "text_config": {
            "num_key_value_heads": HEADS,
            "shared_experts_intermediate_size": 16,
            "swa_num_attention_heads": HEADS,
            "swa_num_key_value_heads": HEADS,
            "swa_q_lora_rank": 12,
            "swa_kv_lora_rank": 16,
            "swa_head_dim": HEAD_DIM,
            "swa_qk_nope_head_dim": 4,
            "swa_v_head_dim": HEAD_DIM,
        },
        "vision_config": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {
        "backbone_hidden_size": HIDDEN,
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_hidden_layers": 2,
            "num_kv_shared_layers": 2,
        },
    },
    "gemma4_unified_assistant": {
        "backbone_hidden_size": HIDDEN,
        "text_config": {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
        },
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    **{
        name: {"layer_types": ["sliding_attention", "full_attention"]}
        for name in ("dots1", "laguna", "mellum")
    },
    "smollm3": {
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "no_rope_layers": [1, 0],
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"head_dim": 16},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse", "full_attention"]},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "reformer": {"axial_pos_embds": False, "num_buckets": 2},
    "xmod": {"default_language": "en_XX"},
    # Its kernels round head sizes up to multiples of 64 in all.
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HEAD_DIM,
    },
    "zaya": {"num_experts_per_tok": 1},
}
#: Whose class takes another configuration than the one of its model type.
KINDS: dict[str, type[PreTrainedConfig]] = {
    "musicgen": MusicgenDecoderConfig,
    "musicgen_melody": MusicgenMelodyDecoderConfig,
}
#: What runs on more than token ids of text: the base is to say so.
OTHER_INPUTS = ("gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody")
#: Why there is no tiny model, where what transformers raises does not say it all.
NOT_BUILT = {
    "gemma3n": "its part for images needs the package timm, which is not installed here, and the "
    "text alone is gemma3n_text",
    "gemma4_assistant": "it drafts tokens on the hidden states and keys of another model, never "
    "alone, and this release of transformers builds it with no configuration",
}


def tiny_configs(model_type: str) -> list[Callable[[], PreTrainedConfig]]:
    """Return makers of configurations to try in turn; not every one is consistent."""
    own = OVERRIDES.get(model_type, {})
    changes = ({}, {"num_key_value_heads": HEADS}, {"num_key_value_heads": None, "head_dim": None})
    kind = KINDS.get(model_type) or CONFIG_MAPPING[model_type]
    return [partial(_shrunk, kind, own | change) for change in changes]


def _shrunk(kind: type[PreTrainedConfig], own: dict[str, Any]) -> PreTrainedConfig:
    default = _default(kind, own)
    fields = vars(default) | {new: None for new in kind.attribute_map}
    wanted: dict[str, Any] = {}
    for name in fields:
        aliased = kind.attribute_map.get(name, name)
        if name in SIZES and aliased not in wanted:
            wanted[aliased] = SIZES[name]
        if _is_dropout(name, fields[name]):
            wanted[name] = 0.1
    wanted |= _layer_kinds(default)
    for name, sub in kind.sub_configs.items():
        present = getattr(default, name, None)
        sub_kind = type(present) if isinstance(present, PreTrainedConfig) else sub
        if isinstance(sub_kind, type) and sub_kind is not AutoConfig:
            wanted[name] = _shrunk(sub_kind, own.get(name, {}))
    wanted |= {name: value for name, value in own.items() if name not in kind.sub_configs}
    return kind(**{name: value for name, value in wanted.items() if value is not None})


def _default(kind: type[PreTrainedConfig], own: dict[str, Any]) -> PreTrainedConfig:
    try:
        return kind()
    except StrictDataclassClassValidationError:  # its own defaults contradict each other
        return kind(**{name: own[name] for name in kind.sub_configs if name in own})


def _is_dropout(name: str, value: object) -> bool:
    says = "dropout" in name or name.endswith("pdrop")
    return says and isinstance(value, float)


def _layer_kinds(default: PreTrainedConfig) -> dict[str, Any]:
    """Return one layer of each kind that the default has, at least two, and how many those are."""
    lists = {
        name: list(value)
        for name, value in vars(default).items()
        if name in ("layer_types", "mlp_layer_types", "layers_block_type") and value
    }
    if not lists:
        return {}
    length = min(len(value) for value in lists.values())
    rows = list(zip(*(value[:length] for value in lists.values()), strict=True))
    kept = sorted({rows.index(row) for row in rows})
    if len(kept) == 1:
        kept = [kept[0], min(kept[0] + 1, length - 1)]
    out: dict[str, Any] = {name: [value[i] for i in kept] for name, value in lists.items()}
    return out | {"num_hidden_layers": len(kept)}
