"""The benchmarked models by their sizes, readable without torch: ours and the peers' build them."""

from typing import Any

from common import ROOT

#: Folder of the model in the package, which every side loads from here.
EMBEDDED = ROOT / "evo_grpo" / "assets" / "tiny-sums"

#: Keywords of LlamaConfig. Random weights: a matmul costs the same whatever it multiplies.
SHAPES: dict[str, dict[str, Any]] = {
    "1M": {
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 256,
    },
    "10M": {
        "hidden_size": 320, "num_hidden_layers": 8, "num_attention_heads": 5,
        "num_key_value_heads": 5, "intermediate_size": 864, "vocab_size": 512,
    },
    "135M": {  # SmolLM2-135M
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
    },
}  # fmt: skip

#: Keywords of Qwen2Config, of Qwen2.5's own shapes, for machines that can hold them.
LARGE: dict[str, dict[str, Any]] = {
    "0.5B": {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936,
    },
    "3B": {
        "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "intermediate_size": 11008, "vocab_size": 151936,
    },
}  # fmt: skip

#: The shape of Qwen2.5-7B, for which costs are counted.
LARGEST: dict[str, dict[str, Any]] = {
    "7B": {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
    },
}  # fmt: skip

#: All of Qwen2, with one that a rehearsal without a card takes.
QWEN2: dict[str, dict[str, Any]] = {
    **LARGE,
    **LARGEST,
    "rehearsal": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 512,
    },
}  # fmt: skip

#: Configurations of released models, without what decides no size.
RELEASED: dict[str, dict[str, Any]] = {
    "Qwen3-4B": {
        "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 9728, "vocab_size": 151936, "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    },
    "Llama-3.1-8B": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 131072,
    },
    "Qwen2.5-0.5B": {
        "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
        "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 32768,
    },
}  # fmt: skip

#: What all of them have.
COMMON: dict[str, Any] = {
    "max_position_embeddings": 1024, "tie_word_embeddings": True, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip

#: Families of architectures, which take the widths of SHAPES, by what else their models have. The
#: windows are so short that they act in rows of 38 tokens.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "smollm3": {"model_type": "smollm3"},
    "granite": {
        "model_type": "granite", "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.0156, "logits_scaling": 8.0,
    },
    "mistral, window": {"model_type": "mistral", "sliding_window": 16},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", "sliding_window": 16},
    "gemma3_text": {"model_type": "gemma3_text", "sliding_window": 16},
}  # fmt: skip

#: The prompts that every side gets: six tokens of the embedded tokenizer, or as many as are asked.
QUESTIONS = ("12+07=", "31+42=", "08+64=", "55+29=")


def question(number: int, tokens: int = 6) -> str:
    """Return a prompt of so many tokens of the embedded tokenizer, by its number."""
    return (QUESTIONS[number % len(QUESTIONS)] * tokens)[:tokens]


#: The adapter that every side trains.
LORA: dict[str, Any] = {
    "r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "task_type": "CAUSAL_LM",
    "target_modules": [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ],
}  # fmt: skip

#: What every side trains with.
LR, BETA = 1e-5, 0.01
