"""GRPO on any `nn.Module` that maps token ids to logits: no population, no LoRA, no tokenizer."""

from evo_grpo.quickstart.diagnostics import StepMetrics, metrics_figure
from evo_grpo.quickstart.grpo import GRPO

__all__ = ["GRPO", "StepMetrics", "metrics_figure"]
