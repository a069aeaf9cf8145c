"""The group `engine.vllm`: how vLLM generates, where `engine.rollout` is `vllm`."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator

from evo_grpo.schema.group import Group, PlainMapping, setting

OURS = (
    *("model", "tokenizer", "skip_tokenizer_init", "trust_remote_code", "seed", "max_model_len"),
    *("max_num_seqs", "enable_lora", "logprobs_mode", "enable_sleep_mode", "generation_config"),
    *("dtype", "quantization", "kv_cache_dtype", "kv_cache_memory_bytes", "enforce_eager"),
    *("gpu_memory_utilization", "tensor_parallel_size", "max_num_batched_tokens"),
    *("max_loras", "max_lora_rank"),
)
"""Keywords of `vllm.LLM` that follow from settings, and are none of `options`."""


def _strings(value: object) -> object:
    """Accept a list of strings; a string alone is one of them."""
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


class VLLMSettings(Group):
    """How vLLM generates; without effect unless `engine.rollout` is `vllm`."""

    process: Literal["child", "inside"] = setting(
        "child",
        "`child`: vLLM runs in a process of its own. `inside`: in that of the trainer, where it "
        "takes over torch.distributed and the number of threads.",
    )
    python: str | None = setting(
        None,
        "The Python that runs vLLM, for instance `~/vllm/bin/python` of a virtual environment in "
        "which evo-grpo need not be; null takes the one that runs evo-grpo.",
        min_length=1,
    )
    model: str | None = setting(
        None,
        "Folder or hub id of the base as vLLM is to load it, for instance a quantised copy; null "
        "takes that of `model`.",
        min_length=1,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "Weights of the base in vLLM; `auto` takes those of the trainer."
    )
    quantization: str | None = setting(
        None, "vLLM's name of a quantisation, for instance `awq`; null quantises nothing."
    )
    kv_cache_dtype: str | None = setting(
        None, "vLLM's name of the keys' and values' dtype, for instance `fp8`; null leaves it."
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        "Bytes for keys and values; null goes by `gpu_memory_utilization`, and takes 1 GiB on a "
        "CPU.",
        ge=1,
    )
    gpu_memory_utilization: float = setting(
        0.3, "Share of a device's memory that vLLM may take.", gt=0, le=1
    )
    tensor_parallel_size: int = setting(1, "Devices that vLLM spreads the base over.", ge=1)
    devices: Annotated[list[int] | None, BeforeValidator(_devices)] = setting(
        None, "CUDA devices of vLLM's process, by number; null takes the trainer's own."
    )
    max_num_batched_tokens: int | None = setting(
        None, "Tokens that vLLM computes in one pass; null leaves it to vLLM.", ge=1
    )
    enforce_eager: bool | None = setting(
        None, "No CUDA graphs and no compiling; null does so on a CPU alone."
    )
    max_loras: int | None = setting(
        None, "Adapters in one batch; null takes as many as there are agents.", ge=1
    )
    max_lora_rank: int | None = setting(
        None, "Largest rank of an adapter; null goes by the agents.", ge=1
    )
    sleep_level: Literal[0, 1, 2] = setting(
        0,
        "What vLLM gives up while agents learn: 0 nothing; 1 keys and values, and the base moves "
        "to the memory of the CPU; 2 the base too, which is loaded again. A CPU cannot.",
    )
    stop_sequences: Annotated[list[str], BeforeValidator(_strings)] = setting(
        factory=list[str], meaning="Strings that end a completion, for instance `</answer>`."
    )
    presence_penalty: float = setting(
        0.0, "Subtracted from the logit of a token that was sampled already.", ge=-2, le=2
    )
    frequency_penalty: float = setting(
        0.0, "The same, once for each time that it was sampled.", ge=-2, le=2
    )
    adapter_folder: str | None = setting(
        None,
        "Folder in which adapters are handed to vLLM; null takes one of its own in memory "
        "(/dev/shm), or among the temporary files.",
        min_length=1,
    )
    timeout: float | None = setting(
        600.0,
        "Seconds without progress after which the process of vLLM counts as hung, which ends the "
        "run: no line in its log while it starts, no step of its engine afterwards. null waits for "
        "ever.",
        ge=2,
        le=1e6,
    )
    options: PlainMapping = setting(
        factory=dict[str, Any],
        meaning="Further keywords of `vllm.LLM`, for instance `{swap_space: 4}`.",
    )

    @property
    def shapes_draws(self) -> bool:
        """Whether a penalty of vLLM's own is in force."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0
