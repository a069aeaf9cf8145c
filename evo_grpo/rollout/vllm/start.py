"""Chooses vLLM's Python, environment and base, and the keyword arguments of `vllm.LLM`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from evo_grpo.errors import ConfigError, EngineUnavailable, ModelError
from evo_grpo.escaping import shorten
from evo_grpo.model.base import SharedBase
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.rollout.vllm import server
from evo_grpo.settings import AgentSettings, VLLMSettings
from evo_grpo.sources import resolve

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts as its largest LoRA rank."""
CPU_CACHE_BYTES = 1 << 30
_PROBE_SECONDS = 60

_QUIET = {
    # Send no usage statistics, and listen on the loopback address only.
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    # Run vLLM's engine in its own process rather than in a further one.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # On a CPU: use OMP_NUM_THREADS threads instead of binding one to each core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_OF_RANKS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK")
"""A launcher's variables for the ranks of a run, which vLLM would take for its own."""


def find_vllm(settings: VLLMSettings) -> str:
    """Return the Python that runs vLLM, after checking that it finds vLLM without loading it."""
    configured = settings.python
    python = sys.executable if configured is None else str(Path(configured).expanduser())
    try:
        completed = subprocess.run(
            [python, server.__file__, "--probe"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=True,
        )
        versions = json.loads(completed.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        reason = getattr(error, "stderr", None) or getattr(error, "strerror", None) or error
        raise EngineUnavailable(
            f"engine.vllm.python: {python!r} cannot be run: {shorten(str(reason).strip())}; name "
            "the Python of an environment in which vLLM is installed"
        ) from error
    if not versions["vllm"]:
        whose = "this Python" if configured is None else repr(python)
        raise EngineUnavailable(
            f"engine.rollout: vllm needs the package vllm, and {whose} ({versions['python']}) has "
            'none; install it there: pip install "evo-grpo[vllm]"; or name the Python of an '
            "environment that has it in engine.vllm.python (evo-grpo need not be installed there); "
            "or leave engine.rollout out"
        )
    return python


def environment(base: SharedBase, settings: AgentSettings) -> dict[str, str]:
    """Return the environment of vLLM's process, made from that of this process."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_RANKS and not name.startswith(("LOCAL_", "TORCHELASTIC_"))
    }
    variables = {**_QUIET, **variables, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    devices = settings.engine.vllm.devices
    if base.device.type == "cuda":
        index = base.device.index or 0
        numbers = devices or range(index, index + settings.engine.vllm.tensor_parallel_size)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [name for name in (visible or "").split(",") if name]
        if visible is not None and max(numbers) >= len(names):
            raise ConfigError(
                f"engine.vllm: expected devices among the {len(names)} of CUDA_VISIBLE_DEVICES, "
                f"got {list(numbers)}; add devices to it, or name others in engine.vllm.devices"
            )
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(
            str(number) if visible is None else names[number] for number in numbers
        )
    return variables


def base_folder(base: SharedBase, settings: AgentSettings, scratch: Path) -> str:
    """Return the folder or hub id of the base for vLLM.

    A base given as a module, from a GGUF file or loaded with `model.config` is written to
    `scratch`.
    """
    model = settings.model
    if settings.engine.vllm.model is not None:
        return str(Path(settings.engine.vllm.model).expanduser())
    if model is not None and not model.config:
        source = resolve(model.name)
        if source.gguf_file is None:
            return source.path
    folder = scratch / "base"
    if not folder.exists():
        base.save(folder)
    return str(folder)


def tokenizer_folder(base: SharedBase, scratch: Path) -> str:
    """Write the trainer's tokenizer to `scratch`, for stop strings; return the folder."""
    assert base.tokenizer is not None, "Ends refuses strings without a tokenizer"
    folder = scratch / "tokenizer"
    base.tokenizer.save_pretrained(str(folder))
    return str(folder)


def rank_of(slots: AdapterSlots, name: str) -> int:
    """Return the largest LoRA rank of an adapter's layers."""
    shapes = slots.shapes(name).items()
    return max(shape[0] for key, shape in shapes if key.endswith(".lora_A.weight"))


def largest_rank(slots: AdapterSlots, settings: AgentSettings) -> int:
    """Return the largest LoRA rank that vLLM reserves memory for."""
    trained = (rank_of(slots, name) for name in slots.names if slots.is_trainable(name))
    # Otherwise vLLM would be restarted for each larger rank that a mutation brings.
    space = settings.search_space()
    needed = max([*trained, int(space["lora.r"].max) if "lora.r" in space.names() else 1])
    vllm = settings.engine.vllm
    if vllm.max_lora_rank is not None:
        if vllm.max_lora_rank < needed:
            raise ConfigError(
                f"engine.vllm.max_lora_rank: expected at least {needed}, the rank of an adapter, "
                f"got {vllm.max_lora_rank}; raise it, or leave it out"
            )
        return vllm.max_lora_rank
    for rank in RANKS:
        if rank >= needed:
            return rank
    raise ModelError(
        f"model.lora: vLLM takes ranks up to {RANKS[-1]}, got {needed}; lower it, or generate with "
        "engine.rollout: native"
    )


def llm_keywords(
    slots: AdapterSlots, settings: AgentSettings, *, folder: str, context: int, rank: int
) -> dict[str, Any]:
    """Return the keywords of `vllm.LLM`.

    `folder` is the folder or hub id of the base, `context` the maximum number of tokens of prompt
    plus completion.
    """
    base, engine, vllm = slots.base, settings.engine, settings.engine.vllm
    on_cpu = base.device.type == "cpu"
    agents = sum(slots.is_trainable(name) for name in slots.names)
    cache = vllm.kv_cache_memory_bytes
    if cache is None and on_cpu and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        cache = CPU_CACHE_BYTES
    # Where vLLM splits a prompt, it rewinds the row's generator, which fails on a CPU.
    chunking: dict[str, Any] = {"enable_chunked_prefill": False} if on_cpu else {}
    keywords: dict[str, Any] = {
        **chunking,
        **vllm.options,
        "model": folder,
        "trust_remote_code": settings.model is not None and settings.model.trust_remote_code,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "seed": 0,
        "max_model_len": context,
        "max_num_seqs": engine.decode_rows,
        "dtype": str(base.dtype).removeprefix("torch.") if vllm.dtype == "auto" else vllm.dtype,
        "enforce_eager": on_cpu if vllm.enforce_eager is None else vllm.enforce_eager,
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "enable_lora": True,
        "max_loras": vllm.max_loras or max(1, agents),
        "max_lora_rank": rank,
        # log_softmax(logits / temperature), without filters or penalties.
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": vllm.sleep_level > 0 and can_sleep(base),
        "quantization": vllm.quantization,
        "kv_cache_dtype": vllm.kv_cache_dtype,
        "kv_cache_memory_bytes": cache,
        "max_num_batched_tokens": vllm.max_num_batched_tokens,
    }
    return {name: value for name, value in keywords.items() if value is not None}


def can_sleep(base: SharedBase) -> bool:
    """Return whether vLLM can free memory on the base's device."""
    return base.device.type == "cuda"
