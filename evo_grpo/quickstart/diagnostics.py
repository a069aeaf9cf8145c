"""What a training step measured, and the plots that show whether it is healthy. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evo_grpo.errors import EngineUnavailable

#: Steps behind `rolling_reward`.
ROLLING = 20


@dataclass(frozen=True)
class StepMetrics:
    """What one step measured.

    Attributes:
        step: 0-based.
        average_reward: Mean reward of the step's completions.
        rolling_reward: Mean of `average_reward` over the last 20 steps.
        policy_loss: Loss without the KL term; its descent raises rewarded completions.
        kl: Mean over tokens of lp - ref, in nats.
        total_loss: policy_loss + kl_coef * kl.
        average_advantage: Near 0 by construction, unless advantages are clipped.
    """

    step: int
    average_reward: float
    rolling_reward: float
    policy_loss: float
    kl: float
    total_loss: float
    average_advantage: float


def metrics_figure(history: Sequence[StepMetrics]) -> Any:  # noqa: ANN401 -- a plotly Figure, an extra
    """Plot every metric over steps: six panels.

    Args:
        history: `trainer.history`.

    Returns:
        A plotly Figure; needs the `report` extra.
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
