"""Metrics of a training step, and their plots. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evo_grpo.errors import EngineUnavailable

ROLLING = 20
"""Steps that `rolling_reward` averages over."""


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step.

    Attributes:
        step: 0-based.
        average_reward: Mean reward of the step's completions.
        rolling_reward: Mean of `average_reward` over the last 20 steps.
        policy_loss: Loss without the KL term.
        kl: Mean over tokens of lp - ref, in nats.
        total_loss: policy_loss + kl_coef * kl.
        average_advantage: Mean advantage; about 0 unless advantages are clipped.
    """

    step: int
    average_reward: float
    rolling_reward: float
    policy_loss: float
    kl: float
    total_loss: float
    average_advantage: float


def metrics_figure(history: Sequence[StepMetrics]) -> Any:  # noqa: ANN401 -- a plotly Figure, an extra
    """Plot each metric over steps, in six panels.

    Args:
        history: `trainer.history`.

    Returns:
        A plotly Figure.

    Raises:
        EngineUnavailable: plotly is not installed; it comes with the `report` extra.
    """
    try:
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise EngineUnavailable(
            'metrics_figure: plotly is missing; install it: pip install "evo-grpo[report]"'
        ) from error

    names = [name for name in StepMetrics.__dataclass_fields__ if name != "step"]
    titles = [name.replace("_", " ") for name in names]
    figure: Any = make_subplots(rows=2, cols=3, subplot_titles=titles)
    steps = [m.step for m in history]
    for place, name in enumerate(names):
        values = [getattr(m, name) for m in history]
        trace = {"type": "scatter", "x": steps, "y": values, "line": {"color": "#4053d3"}}
        figure.add_trace(trace, row=place // 3 + 1, col=place % 3 + 1)
    figure.update_xaxes(title_text="step")
    figure.update_layout(showlegend=False, template="plotly_white", height=560, width=1080)
    return figure
