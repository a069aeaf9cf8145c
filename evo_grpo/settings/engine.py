"""The group `engine`: devices, precision, memory, and the rollout engine."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator

from evo_grpo.schema.group import Group, setting
from evo_grpo.settings.engines.declaration import RolloutSettings
from evo_grpo.settings.engines.native import NativeSettings
from evo_grpo.settings.engines.vllm import VLLMSettings

ENGINES: Mapping[str, type[RolloutSettings]] = {"native": NativeSettings, "vllm": VLLMSettings}
"""The rollout engines by name. `EngineConfig` has a field for each engine with settings."""
if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[tuple(ENGINES)]

DECODE_ROWS = 1024
"""Completions decoded at once if it is not known for how many the memory suffices."""
_UNITS = {"MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}


def _overlap(value: object) -> object:
    """Accept true, false and "auto", and the null of earlier versions as false."""
    if value is None or isinstance(value, bool) or value == "auto":
        return value or False
    parts = f" (for {value} parts, write shards: {value}, overlap: true)"
    raise ValueError(f"true, false or 'auto'{parts if type(value) is int else ''}")


def _switch(value: object) -> object:
    """Accept on and off, which YAML reads as true and false."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


Kernels = Literal["auto", "on", "off"]
Overlap = bool | Literal["auto"]


class EngineConfig(Group):
    """Where and how a run trains and generates."""

    device: str = setting(
        "auto",
        "`auto` takes the first CUDA device, or the CPU if there is none; or `cpu`, `cuda`, "
        "`cuda:1`, `mps`.",
        pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "Weights of the base: `auto` is float32 on the CPU, and bfloat16 on CUDA, or float16 on "
        "cards below compute capability 8.0, which emulate bfloat16.",
    )
    quantization: Literal["int8", "nf4"] | None = setting(
        None,
        "Keep the weights of the base's linear layers in 8 bits (`int8`) or 4 (`nf4`); adapters "
        "stay in float32. Needs bitsandbytes. null keeps the weights in `dtype`.",
    )
    threads: int | None = setting(
        None, "CPU threads; null takes the default of torch.", ge=1, le=1024
    )
    shards: int | None = setting(
        None,
        "Parts of the population that are computed in separate batches; with fewer agents, some "
        "are empty. Their number affects the last digits of results; the number of processes does "
        "not. null takes the number of processes with which the run starts, or with `overlap` "
        "twice as many.",
        ge=1,
    )
    overlap: Annotated[Overlap, BeforeValidator(_overlap)] = setting(
        False,
        "Let the parts of a process take turns: while the rewards of one are computed, the others "
        "generate and learn. For reward functions and games that wait long, for a service for "
        "instance; the results are those of as many `shards` without it. `auto` decides by the "
        "seconds of the first round.",
    )
    offload_adapters: bool = setting(
        False,
        "Keep the adapters and AdamW's moments of agents that do not compute in host memory. The "
        "part that computes and the next one are on the device, so it takes three `shards` or "
        "more. For more agents than a device holds.",
    )
    base: Literal["replicated", "sharded"] = setting(
        "replicated",
        "`replicated`: each process has the whole base. `sharded`: each process has a part of "
        "every layer, and each pass gathers the layers; slower, for a base larger than a device.",
    )
    zero: Literal[2, 3] | None = setting(
        None,
        "Train with DeepSpeed's ZeRO: `2` divides the moments and gradients of an adapter among "
        "the processes, `3` also the layers of the base. All processes train one agent after the "
        "other together. null trains all agents at once with AdamW.",
    )
    rollout: EngineName = setting(
        "native",
        "The rollout engine: `native`, which is built in, or `vllm`, which must be installed.",
    )
    vllm: VLLMSettings = setting(VLLMSettings(), "How vLLM generates.")
    memory: str | None = setting(
        None,
        "Memory that each process may use, such as `24GB` (10^9 bytes) or `24GiB` (2^30). null is "
        "what other processes leave of a CUDA device; on a CPU, nothing is chosen by it.",
        pattern=r"^[0-9]{1,5}(\.[0-9]{1,3})?(MB|MiB|GB|GiB)$",
    )
    max_tokens_per_microbatch: int | None = setting(
        None,
        "Most padded tokens in one forward and backward pass; fewer need less memory. null depends "
        "on the model on a CPU, from 2,048 (large) to 8,192 (small); on a CUDA device, or with "
        "`memory`, it is as many as fit.",
        ge=1,
    )
    max_rows_per_microbatch: int | None = setting(
        None, "Most rows in one forward and backward pass; null sets no limit.", ge=1
    )
    max_decode_rows: int | None = setting(
        None,
        "Most completions decoded at once; fewer need less memory for the cache. null is 1,024 on "
        "a CPU, and on a CUDA device, or with `memory`, as many as fit.",
        ge=1,
    )
    max_decode_prompts: int | None = setting(
        None, "Most prompts of each agent decoded at once; null sets no limit.", ge=1
    )
    gradient_checkpointing: bool = setting(
        False, "Recompute activations in the backward pass; slower, but needs less memory."
    )
    cuda_graphs: bool = setting(
        True,
        "Generate by CUDA graphs, which launch the kernels of a decode step at once. Acts on a "
        "CUDA device, with the built-in engine, on models of the Llama family.",
    )
    kernels: Annotated[Kernels, BeforeValidator(_switch)] = setting(
        "auto",
        "Generate and learn with models of the Llama family by kernels of evo-grpo: `auto` takes "
        "them on CUDA devices of compute capability 8.0 or newer, with Triton, in half precision; "
        "`on` generates by them in float32 too; `off` takes torch's own. They give other last "
        "digits.",
    )

    def parts(self, processes: int = 1) -> int:
        """Return the number of parts of the population in a run on `processes` processes."""
        return self.shards or processes * (2 if self.overlap else 1)

    @property
    def decode_rows(self) -> int:
        """Most completions decoded at once; `DECODE_ROWS` if `max_decode_rows` is null."""
        return self.max_decode_rows or DECODE_ROWS

    @property
    def memory_bytes(self) -> int | None:
        """`memory` in bytes; None if it is null."""
        if self.memory is None:
            return None
        number = self.memory.rstrip("GMiB")
        return int(float(number) * _UNITS[self.memory[len(number) :]])

    @property
    def each_alone(self) -> bool:
        """Whether processes compute independently within a step."""
        return self.base == "replicated" and self.zero is None

    @property
    def engines(self) -> dict[str, RolloutSettings]:
        """The settings of every rollout engine by its name."""
        return {name: getattr(self, name, kind()) for name, kind in ENGINES.items()}

    @property
    def rollout_settings(self) -> RolloutSettings:
        """The settings of the rollout engine that is selected."""
        return self.engines[self.rollout]

    def with_default_rollout(self, **changes: Any) -> Self:
        """Return a copy with `changes`, the default rollout engine and each engine's defaults."""
        fields = type(self).model_fields
        defaults = {name: fields[name].default for name in ("rollout", *ENGINES) if name in fields}
        return self.replace(**defaults, **changes)
