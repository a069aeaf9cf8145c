"""Time and tokens by round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evo_grpo.readers.report.figures.axes import COLORS, new_figure, round_axis
from evo_grpo.record.view import Run, view_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

PATTERNS = ("", "/", "x", ".", "\\", "+", "-", "|")
"""Patterns that distinguish bars without colours."""


def plot_seconds(run: Run) -> go.Figure:
    """Draw the wall seconds of each round by phase."""
    view = view_of(run)
    phases = list(dict.fromkeys(name for r in view.rounds for name in r.seconds))
    values = {p: [r.seconds.get(p, 0.0) for r in view.rounds] for p in phases}
    return _bars(values, "seconds", "%{y:.2f} s")


def plot_tokens(run: Run) -> go.Figure:
    """Draw the tokens that each round sampled for training and for evaluation."""
    rounds = view_of(run).rounds
    values = {
        "training": [float(sum(a.tokens for a in r.agents)) for r in rounds],
        "evaluation": [float(r.evaluation_tokens) for r in rounds],
    }
    return _bars(values, "tokens", "%{y:,} tokens")


def _bars(values: dict[str, list[float]], title: str, shown: str) -> go.Figure:
    figure = new_figure("round", title, height=320)
    count = max(map(len, values.values()), default=0)
    for index, (name, own) in enumerate(values.items()):
        figure.add_bar(
            x=list(range(1, count + 1)), y=own, name=name,
            hovertemplate=f"round %{{x}}, {name}: {shown}<extra></extra>",
            marker={"color": COLORS[index % len(COLORS)],
                    "pattern": {"shape": PATTERNS[index % len(PATTERNS)], "solidity": 0.3}},
        )  # fmt: skip
    figure.update_layout(barmode="stack")
    figure.update_yaxes(exponentformat="none", separatethousands=True)
    round_axis(figure, count)
    return figure
