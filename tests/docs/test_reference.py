"""docs/reference.md says what the code says."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_code_says():
    script = ROOT / "docs" / "generate_reference.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_argument_of_the_reference_api_is_there():
    page = (ROOT / "docs" / "reference.md").read_text()
    names = [
        "pad_token_id",
        "pad_token",
        "model_name",
        "actor_network",
        "model_config",
        "hp_config",
        "index",
        "batch_size",
        "beta",
        "lr",
        "clip_coef",
        "max_grad_norm",
        "update_epochs",
        "group_size",
        "temperature",
        "repetition_penalty",
        "top_p",
        "top_k",
        "min_p",
        "use_memory_efficient_params",
        "calc_position_embeddings",
        "micro_batch_size_per_gpu",
        "max_output_tokens",
        "min_output_tokens",
        "max_model_len",
        "hf_generate_chunk_size",
        "lora_config",
        "cosine_lr_schedule_config",
        "accelerator",
        "device",
        "wrap",
        "clone",
        "use_vllm",
        "vllm_config",
        "seed",
        "gradient_checkpointing",
        "torch_compiler",
        "use_liger_loss",
        "use_kl_advantage_shaping",
        "adv_norm",
        "loss_type",
        "use_separate_reference_adapter",
        "whiten_advantages",
        "adv_clip_range",
        "filter_zero_adv",
        "adv_filter_eps",
        "reduce_memory_peak",
        "use_fused_linear_logprobs",
        "cast_logprobs_to_fp32",
    ]
    missing = [name for name in names if f"`{name}`" not in page]
    assert not missing
