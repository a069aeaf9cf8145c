"""GRPO on any `nn.Module` under its documented path; the code is in `evo_grpo.api.whole_model`."""

from evo_grpo.api.whole_model.grpo import GRPO, StepMetrics

__all__ = ["GRPO", "StepMetrics"]
