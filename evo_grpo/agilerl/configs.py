"""The small configurations that AgileRL's constructors take as objects; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from evo_grpo.objective.lr_schedule import lr_factor
from evo_grpo.schema.problems import Problem, Problems
from evo_grpo.settings import LRSchedule


@dataclass(frozen=True)
class VLLMConfig:
    """Settings of generation with vLLM, for `use_vllm=True`.

    Attributes:
        tensor_parallel_size: Devices one engine is spread over.
        gpu_memory_utilization: Share of the device's memory the engine may take.
        max_num_seqs: Sequences decoded at once.
        sleep_mode: Free the engine's memory while the agents learn.
    """

    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.3
    max_num_seqs: int = 8
    sleep_mode: bool = False


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
        """Check the values, and keep Python's own numbers in place of numpy's."""
        schedule = self.schedule()
        object.__setattr__(self, "num_epochs", schedule.steps)
        object.__setattr__(self, "warmup_proportion", schedule.warmup_proportion)

    def schedule(self) -> LRSchedule:
        """Return the same as `evo_grpo` calls it."""
        try:
            return LRSchedule(steps=self.num_epochs, warmup_proportion=self.warmup_proportion)
        except Problems as problems:
            found = [
                Problem(("num_epochs",) if p.path == ("steps",) else p.path, p.text)
                for p in problems.found
            ]
            raise Problems(*found) from None

    def factor(self, step: int) -> float:
        """Return what multiplies lr in a GRPO step, 0-based; see `lr_factor`."""
        return lr_factor(self.schedule(), step)
