"""vLLM as a rollout engine: the group `engine.vllm`, its checks and memory."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from evo_grpo.schema.group import PlainMapping, contradictions, only, setting
from evo_grpo.schema.problems import Problem
from evo_grpo.settings.engines.declaration import Device, EngineLoad, Part, RolloutSettings
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
"""Bytes of the keys and values if no setting says how many."""
_LOGIT_TENSORS = 2
"""float32 tensors (rows, V) that exist while tokens are drawn."""
_SEQUENCES = 16
"""Sequences for which a proposed share of a device has room; with fewer, vLLM would be slow."""
_LOWERS = "engine.vllm.sleep_level, engine.vllm.gpu_memory_utilization"


Devices = Annotated[
    list[int] | None,
    only(
        lambda value: (
            value is None
            or (
                isinstance(value, list)
                and value
                and all(type(item) is int and item >= 0 for item in value)
            )
        ),
        "null, or a list of device numbers such as [0, 1]",
    ),
]


class VLLMSettings(RolloutSettings):
    """The settings of vLLM; they have no effect unless `engine.rollout` is `vllm`."""

    implementation: ClassVar[str] = "evo_grpo.rollout.vllm.vllm_engine:VLLMEngine"
    ignores: ClassVar[Mapping[str, str]] = {
        "max_decode_prompts": "which makes its own batches; bound them with engine.max_decode_rows",
    }
    of_machine: ClassVar[tuple[str, ...]] = ("python", "adapter_folder", "devices")
    adjustable: ClassVar[tuple[str, ...]] = ("timeout",)
    programs: ClassVar[tuple[str, ...]] = ("python",)

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
    devices: Devices = setting(
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
        meaning="Further keywords of `vllm.LLM`, for instance `{block_size: 32}`.",
    )

    @property
    def shapes_draws(self) -> bool:
        """Whether a penalty that only vLLM supports is set."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    def problems(self, device: str, lora: LoraSettings | None) -> Iterator[Problem]:
        """Yield contradictions among the settings of `engine.vllm`."""
        for name in self.options:
            if name in OURS:
                text = "the run passes this keyword to vLLM itself; remove it"
                if name in type(self).model_fields:
                    text = f"use engine.vllm.{name} instead"
                yield Problem(("options", name), text)
        size, sleeps_on_cpu = self.tensor_parallel_size, self.sleep_level and device == "cpu"
        rank = 0 if lora is None else max([lora.r, *lora.rank_pattern.values()])
        few, low = len(self.devices or range(size)) < size, (self.max_lora_rank or rank) < rank
        devices = f"at least tensor_parallel_size ({size}) devices"
        yield from contradictions(
            self,
            ("sleep_level", sleeps_on_cpu, "0 with engine.device: cpu", "leave it out"),
            ("devices", few, devices, "name more of them"),
            ("max_lora_rank", low, f"at least {rank}, the largest rank of an agent", "raise it"),
        )

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

    def held_memory(self, load: EngineLoad) -> tuple[Part, ...]:
        """Return vLLM's memory while agents learn: all, or its bare process if vLLM sleeps."""
        if self._elsewhere(load):
            return ()
        awake, asleep = self._awake(load), self._asleep(load)
        if not self._sleeps(load):
            return (Part("vLLM", awake, _LOWERS),)
        return (Part("vLLM asleep", asleep, ""),)

    def sampling_memory(self, load: EngineLoad) -> tuple[Part, ...]:
        """Return the memory that a sleeping vLLM takes again to sample."""
        if self._elsewhere(load) or not self._sleeps(load):
            return ()
        return (Part("vLLM awake", self._awake(load) - self._asleep(load), _LOWERS),)

    def shortages(self, load: EngineLoad) -> Iterator[str]:
        """Yield a sentence if vLLM's share of a GPU cannot hold base, adapters and one sequence."""
        share, least = self._share(load), self._least(load)
        if share is not None and share < least:
            yield (
                f"engine.vllm.gpu_memory_utilization {self.gpu_memory_utilization:g} gives vLLM "
                f"{share / 1e9:.1f} GB, and its base, adapters and one sequence take "
                f"{least / 1e9:.1f} GB"
            )

    def remedies(self, load: EngineLoad) -> Iterator[Mapping[str, object]]:
        """Yield a sleep level, and the share of a GPU that holds the base and some sequences."""
        if self._elsewhere(load):
            return
        if load.device == "cuda" and not self.sleep_level:
            yield {"sleep_level": 1}
        share = self._share(load)
        if share is not None and load.capacity is not None:
            # Room for the sequences that are decoded at once, or for some of them.
            needed = self._least(load) + min(load.rows, _SEQUENCES) * self._sequence(load)
            fraction = ceil(100 * needed / load.capacity) / 100
            if fraction <= 1 and fraction != self.gpu_memory_utilization:
                yield {"gpu_memory_utilization": fraction}

    def _sleeps(self, load: EngineLoad) -> bool:
        return self.sleep_level > 0 and load.device == "cuda"

    def _elsewhere(self, load: EngineLoad) -> bool:
        """Return whether vLLM runs on other devices than the trainer."""
        on_cuda, chosen = load.device == "cuda", self.devices
        return on_cuda and chosen is not None and load.number not in chosen

    def _share(self, load: EngineLoad) -> int | None:
        """Return how many bytes of a device vLLM may use; None without such a limit."""
        if load.device != "cuda" or load.capacity is None or self.kv_cache_memory_bytes is not None:
            return None
        return int(self.gpu_memory_utilization * load.capacity)

    def _asleep(self, load: EngineLoad) -> int:
        return _PROCESS_BYTES[load.device]

    def _sequence(self, load: EngineLoad) -> int:
        """Return the bytes of the keys and values of one sequence."""
        work, shape = load.work, load.shape
        size = 1 if (self.kv_cache_dtype or "").startswith("fp8") else load.element
        tokens = work.prompt_tokens + work.output_tokens
        return tokens * shape.layers * 2 * shape.kv_width * size // self.tensor_parallel_size

    def _least(self, load: EngineLoad) -> int:
        """Return the least bytes of vLLM: process, base, adapters, logits and one sequence."""
        work = load.work
        agents = self.max_loras or work.agents
        weights = load.weights
        if self.quantization is not None and load.element > 1:
            weights //= 2  # 8 bits; a smaller quantisation leaves more for keys and values
        adapters = agents * work.parameters * load.element
        logits = _LOGIT_TENSORS * 4 * load.rows * load.shape.vocabulary
        divided = (weights + adapters) // self.tensor_parallel_size
        return _PROCESS_BYTES[load.device] + divided + logits + self._sequence(load)

    def _awake(self, load: EngineLoad) -> int:
        least, share = self._least(load), self._share(load)
        if share is not None:
            return max(least, share)  # vLLM fills its share with keys and values
        return least - self._sequence(load) + (self.kv_cache_memory_bytes or _CACHE_BYTES)
