"""Configuration objects of AgileRL's constructors; loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Self

from evo_grpo.learn.objective.lr_schedule import lr_factor
from evo_grpo.schema.problems import Path, Problem, Problems
from evo_grpo.settings import EngineConfig, LRSchedule, VLLMSettings


@dataclass(frozen=True)
class VLLMConfig:
    """Settings of generation with vLLM, for `use_vllm=True`: AgileRL's, and `python`.

    In AgileRL every agent has an engine; here one engine serves all agents. So AgileRL's defaults
    of `max_num_seqs`, `max_loras` and `max_lora_rank` mean as many as the agents need. Other
    numbers act unchanged.

    Attributes:
        tensor_parallel_size: Devices that the engine is spread over.
        gpu_memory_utilization: Share of a device's memory that the engine may take.
        max_num_seqs: Sequences decoded at once.
        max_num_batched_tokens: Tokens computed in one pass; None leaves it to vLLM.
        enforce_eager: No CUDA graphs; None does so on a CPU alone.
        sleep_mode: Free the engine's memory while the agents learn; also for a population.
        sleep_mode_level: 1 keeps the base in the memory of the CPU, 2 loads it again.
        dtype: Weights of the base in vLLM; None takes those of the trainer.
        quantization: vLLM's name of a quantisation.
        vllm_model_name_or_path: The base as vLLM is to load it; None takes the trainer's.
        kv_cache_dtype: vLLM's name of the keys' and values' dtype.
        max_lora_rank: Largest rank of an adapter.
        max_loras: Adapters in one batch.
        stop_sequences: Strings that end a completion.
        presence_penalty: Subtracted from the logit of a token that was sampled already.
        frequency_penalty: The same, once for each time that it was sampled.
        kv_cache_memory_bytes: Bytes for keys and values.
        lora_staging_dir: Folder in which adapters are handed to vLLM.
        python: The Python that runs vLLM; None takes this one. Not AgileRL's.
    """

    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.3
    max_num_seqs: int = 8
    max_num_batched_tokens: int | None = None
    enforce_eager: bool | None = None
    sleep_mode: bool = False
    sleep_mode_level: int = 1
    dtype: str | None = None
    quantization: str | None = None
    vllm_model_name_or_path: str | None = None
    kv_cache_dtype: str | None = None
    max_lora_rank: int = 16
    max_loras: int = 1
    _: KW_ONLY
    stop_sequences: list[str | int] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    kv_cache_memory_bytes: int | None = None
    lora_staging_dir: str | None = None
    python: str | None = None

    def keywords(self) -> dict[str, Any]:
        """Return the keywords of `evo_grpo`: `vllm`, `stop`, and `max_decode_rows` if it is set."""
        vllm: dict[str, Any] = {
            ours: getattr(self, name)
            for name, ours in VLLM_NAMES.items()
            if getattr(self, name) != _UNSAID.get(name, ...)
        }
        vllm["sleep_level"] = self.sleep_mode_level if self.sleep_mode else 0
        vllm["dtype"] = self.dtype or "auto"
        keywords = {"vllm": vllm, "stop": self.stop_sequences or []}
        if self.max_num_seqs == _UNSAID["max_num_seqs"]:
            return keywords
        return {**keywords, "max_decode_rows": self.max_num_seqs}

    @classmethod
    def of(cls, engine: EngineConfig, stop: Sequence[str | int] = ()) -> Self | None:
        """Return the settings of vLLM under AgileRL's names; None if vLLM is not selected.

        Args:
            engine: The settings of the engine.
            stop: `algorithm.stop`.
        """
        vllm = engine.rollout_settings
        if not isinstance(vllm, VLLMSettings):
            return None
        given: dict[str, Any] = {n: getattr(vllm, ours) for n, ours in VLLM_NAMES.items()}
        given = {n: _UNSAID.get(n) if v is None else v for n, v in given.items()}
        given.update(
            sleep_mode=vllm.sleep_level > 0,
            sleep_mode_level=vllm.sleep_level or 1,
            dtype=None if vllm.dtype == "auto" else vllm.dtype,
            stop_sequences=list(stop) or None,
            max_num_seqs=engine.max_decode_rows or _UNSAID["max_num_seqs"],
        )
        return cls(**given)


VLLM_NAMES: dict[str, str] = {
    **{name: name for f in fields(VLLMConfig) if (name := f.name) in VLLMSettings.model_fields},
    "vllm_model_name_or_path": "model",
    "lora_staging_dir": "adapter_folder",
}
"""AgileRL's name of a setting -> its name in `engine.vllm`."""

_UNSAID = {"max_num_seqs": 8, "max_loras": 1, "max_lora_rank": 16}
"""AgileRL's defaults, which are too few for an engine of all agents."""


@dataclass(frozen=True)
class CosineLRScheduleConfig:
    """Linear warm-up, then a cosine to zero, over the GRPO steps of an agent.

    Attributes:
        num_epochs: GRPO steps until the end, >= 1.
        warmup_proportion: Share of them that warms up, in [0, 1).

    Raises:
        ConfigError: A value is out of range.
    """

    num_epochs: int
    warmup_proportion: float = 0.05

    def __post_init__(self) -> None:
        """Check the values."""
        self.schedule()

    def schedule(self) -> LRSchedule:
        """Return the schedule as a setting of `evo_grpo`."""
        try:
            return LRSchedule(steps=self.num_epochs, warmup_proportion=self.warmup_proportion)
        except Problems as problems:
            names: dict[Path, Path] = {("steps",): ("num_epochs",)}
            found = (Problem(names.get(p.path, p.path), p.text) for p in problems.found)
            raise Problems(*found) from None

    def factor(self, step: int) -> float:
        """Return the factor of lr in a GRPO step, 0-based; see `lr_factor`."""
        return lr_factor(self.schedule(), step)
