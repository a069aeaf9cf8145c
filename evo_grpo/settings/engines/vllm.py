"""vLLM as a rollout engine: the group `engine.vllm`, its checks, memory and lines in the plan."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator

from evo_grpo.schema.group import PlainMapping, setting
from evo_grpo.schema.problems import Problem
from evo_grpo.settings.engines.declaration import RolloutSettings
from evo_grpo.settings.engines.memory import Device, Part
from evo_grpo.settings.model import LoraSettings

OURS = (
    *("model", "tokenizer", "skip_tokenizer_init", "trust_remote_code", "seed", "max_model_len"),
    *("max_num_seqs", "enable_lora", "logprobs_mode", "enable_sleep_mode", "generation_config"),
    *("dtype", "quantization", "kv_cache_dtype", "kv_cache_memory_bytes", "enforce_eager"),
    *("gpu_memory_utilization", "tensor_parallel_size", "max_num_batched_tokens"),
    *("max_loras", "max_lora_rank"),
)
"""Keywords of `vllm.LLM` that other settings decide, so that `options` may not hold them."""
_PROCESS_BYTES: Mapping[Device, int] = {"cpu": 1700 << 20, "cuda": 1 << 30}
"""Memory of vLLM's process before it loads a model."""
_CACHE_BYTES = 1 << 30
"""Keys and values where no setting gives their size."""


def _strings(value: object) -> object:
    """Accept a list of strings, or one string."""
    items = [value] if isinstance(value, str) else value
    if isinstance(items, list | tuple) and all(
        isinstance(item, str) and item for item in cast("list[object]", items)
    ):
        return list(cast("list[str]", items))
    raise ValueError('a list of strings such as ["</answer>"]')


def _devices(value: object) -> object:
    items = list(cast("list[object]", value)) if isinstance(value, list | tuple) else []
    if value is None or (items and all(type(item) is int and item >= 0 for item in items)):
        return None if value is None else items
    raise ValueError("null, or a list of device numbers such as [0, 1]")


class VLLMSettings(RolloutSettings):
    """The settings of vLLM; they have no effect unless `engine.rollout` is `vllm`."""

    implementation: ClassVar[str] = "evo_grpo.rollout.vllm.engine:VLLMEngine"
    ignores: ClassVar[Mapping[str, str]] = {
        "max_decode_prompts": "which makes its own batches; bound them with engine.max_decode_rows",
    }
    of_machine: ClassVar[tuple[str, ...]] = ("python", "adapter_folder", "devices")
    adjustable: ClassVar[tuple[str, ...]] = ("timeout",)
    programs: ClassVar[tuple[str, ...]] = ("python",)

    process: Literal["child", "inside"] = setting(
        "child",
        "`child`: vLLM runs in a separate process. `inside`: vLLM runs in the trainer's process, "
        "where it takes over torch.distributed and the number of threads.",
    )
    python: str | None = setting(
        None,
        "The Python that runs vLLM, for instance `~/vllm/bin/python` of a virtual environment; "
        "evo-grpo need not be installed there. null takes the Python that runs evo-grpo.",
        min_length=1,
    )
    model: str | None = setting(
        None,
        "Folder or hub id of the base that vLLM loads, for instance a quantised copy; null takes "
        "that of `model`.",
        min_length=1,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "Dtype of the base's weights in vLLM; `auto` takes that of the trainer."
    )
    quantization: str | None = setting(
        None, "vLLM's name of a quantisation, for instance `awq`; null does not quantise."
    )
    kv_cache_dtype: str | None = setting(
        None, "vLLM's name of the dtype of the cache, for instance `fp8`; null takes its default."
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        "Bytes for keys and values; null follows `gpu_memory_utilization` on a GPU, and takes "
        "1 GiB on a CPU.",
        ge=1,
    )
    gpu_memory_utilization: float = setting(
        0.3, "Share of a device's memory that vLLM may use.", gt=0, le=1
    )
    tensor_parallel_size: int = setting(1, "Devices that vLLM spreads the base over.", ge=1)
    devices: Annotated[list[int] | None, BeforeValidator(_devices)] = setting(
        None, "CUDA devices of vLLM's process, by number; null takes those of the trainer."
    )
    max_num_batched_tokens: int | None = setting(
        None, "Most tokens that vLLM computes in one pass; null takes its default.", ge=1
    )
    enforce_eager: bool | None = setting(
        None, "Use neither CUDA graphs nor compilation; null means true on a CPU, else false."
    )
    max_loras: int | None = setting(
        None, "Most adapters in one batch; null takes the number of agents.", ge=1
    )
    max_lora_rank: int | None = setting(
        None, "Largest rank of an adapter; null takes the largest rank of the agents.", ge=1
    )
    sleep_level: Literal[0, 1, 2] = setting(
        0,
        "Memory that vLLM frees while agents learn. 0: none. 1: keys and values, and the base "
        "moves to the memory of the CPU. 2: also the base, which is loaded again. Needs a GPU.",
    )
    stop_sequences: Annotated[list[str], BeforeValidator(_strings)] = setting(
        factory=list[str], meaning="Strings that end a completion, for instance `</answer>`."
    )
    presence_penalty: float = setting(
        0.0, "Subtracted from the logits of tokens that were already sampled.", ge=-2, le=2
    )
    frequency_penalty: float = setting(
        0.0, "Subtracted from a token's logit once for each time it was sampled.", ge=-2, le=2
    )
    adapter_folder: str | None = setting(
        None,
        "Folder through which adapters are passed to vLLM; null creates one in memory (/dev/shm), "
        "or among the temporary files.",
        min_length=1,
    )
    timeout: float | None = setting(
        600.0,
        "Seconds without progress after which vLLM's process counts as hung and the run ends. "
        "Progress is a line in its log while it starts, and a step of its engine afterwards. null "
        "waits forever.",
        ge=2,
        le=1e6,
    )
    options: PlainMapping = setting(
        factory=dict[str, Any],
        meaning="Further keywords of `vllm.LLM`, for instance `{swap_space: 4}`.",
    )

    @property
    def shapes_draws(self) -> bool:
        """Whether a penalty that only vLLM has is in force."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    def problems(self, device: str, lora: LoraSettings | None) -> Iterator[Problem]:
        """Yield contradictions among the settings of `engine.vllm`."""
        for name in self.options:
            if name in OURS:
                text = "the run passes this keyword to vLLM itself; remove it"
                if name in type(self).model_fields:
                    text = f"use engine.vllm.{name} instead"
                yield Problem(("options", name), text)
        if self.process == "inside":
            for name in ("python", "devices"):
                if getattr(self, name) is not None:
                    text = "expected null with process: inside, which uses the trainer's; remove it"
                    yield Problem((name,), text)
        if self.sleep_level and device == "cpu":
            text = f"expected 0 with engine.device: cpu, which cannot sleep, got {self.sleep_level}"
            yield Problem(("sleep_level",), text)
        if self.devices is not None and len(self.devices) < self.tensor_parallel_size:
            text = (
                f"expected at least tensor_parallel_size ({self.tensor_parallel_size}) devices, "
                f"got {len(self.devices)}"
            )
            yield Problem(("devices",), text)
        rank = 0 if lora is None else max([lora.r, *lora.rank_pattern.values()])
        if self.max_lora_rank is not None and self.max_lora_rank < rank:
            text = f"expected at least {rank}, the rank of model.lora, got {self.max_lora_rank}"
            yield Problem(("max_lora_rank",), text)

    def missing(self) -> Iterator[str]:
        """Yield a warning if vLLM, or the Python that runs it, is missing."""
        if self.python is None:
            if find_spec("vllm") is None:
                yield (
                    "engine.rollout is vllm, and this Python has no vllm: a run will be refused "
                    'here; pip install "evo-grpo[vllm]", or name the Python of another environment '
                    "in engine.vllm.python"
                )
        elif not os.access(Path(self.python).expanduser(), os.X_OK):
            yield (
                f"engine.vllm.python: {self.python} is not a program on this machine: a run will "
                "be refused"
            )

    def plan_lines(self) -> Iterator[tuple[str, str]]:
        """Yield where vLLM runs, and that its log-probs are not the trainer's."""
        python = "this Python" if self.python is None else self.python
        where = "in a separate process" if self.process == "child" else "in the trainer's process"
        yield "generates", f"vLLM {where}, run by {python}; it loads the base once more"
        yield (
            "",
            "its log-probs differ from the trainer's by sampler_gap; algorithm.sampler_correction "
            "corrects for the difference",
        )

    def held_memory(self, base: int, device: Device) -> tuple[Part, ...]:
        """Return the memory of vLLM: its process, the base once more, keys and values."""
        cache = self.kv_cache_memory_bytes or _CACHE_BYTES
        lowers = "engine.vllm.kv_cache_memory_bytes, engine.vllm.gpu_memory_utilization"
        return (Part("vLLM", _PROCESS_BYTES[device] + base + cache, lowers),)
