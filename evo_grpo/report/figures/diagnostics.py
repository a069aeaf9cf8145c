"""What training measured, step by step: one figure for each metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evo_grpo.report.contents import Run, RunContents, contents_of
from evo_grpo.report.figures.points import lineage_name
from evo_grpo.report.figures.style import MARKERS, graph_objects, layout, look_of
from evo_grpo.report.steps import Curve, Curves, curves, metric_names

if TYPE_CHECKING:
    import plotly.graph_objects as go

ROLLING = 10
"""Steps of a rolling mean."""
POINTS = 6000
"""Points of a figure; with more, each is the mean of several neighbours."""
FEW = 13
"""Points of a curve, with the gap behind it, up to which each has its marker."""
LABELS = {
    "reward": "reward",
    "loss": "loss",
    "kl": "KL from the base (nats per token)",
    "clip_fraction": "tokens clipped (share)",
    "zero_variance": "groups of equal rewards (share)",
    "entropy": "entropy (nats per token)",
    "completion_length": "completion length (tokens)",
    "ended": "completions that ended (share)",
    "sampler_gap": "gap of sampler's log-probs (nats)",
    "grad_norm": "gradient norm",
    "ratio_max": "largest probability ratio",
}
COLUMNS, ROW = 2, 240


def plot_diagnostics(run: Run, names: Sequence[str] | None = None) -> go.Figure:
    """Draw what training measured over its steps, a small figure for each metric.

    Rewards are drawn as rolling means over 10 steps above the values themselves. Runs that kept no
    metrics of their steps are drawn by the means of their rounds.

    Args:
        run: A run folder, a `Population`, or its rounds.
        names: Metrics; None takes all that the run has.

    Raises:
        EngineUnavailable: plotly is not installed.
        EvoGrpoError: The folder cannot be read.
    """
    contents = contents_of(run)
    graph_objects("plot_diagnostics")
    from plotly.subplots import make_subplots

    measured = curves(contents)
    chosen = list(names) if names is not None else metric_names(measured)
    rows = max(1, -(-len(chosen) // COLUMNS))
    titles = [label(name) for name in chosen]
    figure = make_subplots(rows=rows, cols=COLUMNS, subplot_titles=titles, shared_xaxes=False)
    figure.update_layout(**layout(60 + ROW * rows))
    for number, name in enumerate(chosen):
        row, column = divmod(number, COLUMNS)
        for trace in traces(contents, measured, name, legend=number == 0):
            figure.add_trace(trace, row=row + 1, col=column + 1)
    figure.update_xaxes(title_text="step")
    return figure


def plot_metric(contents: RunContents, measured: Curves, name: str) -> go.Figure:
    """Draw one metric; see `plot_diagnostics`.

    Args:
        contents: The run.
        measured: Its curves.
        name: The metric.
    """
    objects = graph_objects("plot_metric")
    figure = objects.Figure(layout=layout(260))
    for trace in traces(contents, measured, name, legend=False):
        figure.add_trace(trace)
    figure.update_layout(title={"text": label(name), "font": {"size": 13}}, showlegend=False)
    figure.update_layout(margin={"t": 36})
    figure.update_xaxes(title_text="step")
    return figure


def label(name: str) -> str:
    """Return what a metric is called in a figure."""
    if name.startswith("reward/"):
        return f"reward by {name.removeprefix('reward/')}"
    return LABELS.get(name, name.replace("_", " "))


def traces(
    contents: RunContents,
    measured: Curves,
    name: str,
    *,
    legend: bool,
) -> list[Any]:
    """Return the curves of a metric as traces: one for each lineage, agents parted by gaps."""
    objects = graph_objects("figures")
    own = measured.get(name, [])
    # By the order of the lineages in every other figure.
    looks = {one: look_of(i) for i, one in enumerate(sorted(set(contents.founders().values())))}
    width = max(1, math.ceil(sum(len(curve.steps) for curve in own) / POINTS))
    found: list[Any] = []
    for founder in sorted({curve.founder for curve in own}):
        drawn = [thinned(curve, width) for curve in own if curve.founder == founder]
        x = joined([steps for steps, _ in drawn])
        faint = joined([values for _, values in drawn])
        smooth = [rolling(values) if name.startswith("reward") else values for _, values in drawn]
        y = joined(smooth)
        look, title = looks[founder], lineage_name(contents, founder)
        if name.startswith("reward"):
            found.append(
                objects.Scatter(
                    x=x, y=faint, mode="markers", hoverinfo="skip", showlegend=False,
                    legendgroup=title, opacity=0.3,
                    marker={"color": look.color, "symbol": look.symbol, "size": 4,
                            "maxdisplayed": 4 * MARKERS},
                )
            )  # fmt: skip
        many = len(x) > FEW * len(drawn)
        found.append(
            objects.Scatter(
                x=x, y=y, mode="lines" if many else "lines+markers",
                name=title, legendgroup=title, showlegend=legend,
                line={"color": look.color, "dash": look.dash, "width": 2},
                marker={"symbol": look.symbol, "size": 6, "maxdisplayed": MARKERS},
                hovertemplate="step %{x}: %{y:.4g}<extra>" + title + "</extra>",
            )
        )  # fmt: skip
    return found


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return curves one behind the other, parted by NaN."""
    return np.concatenate([value for part in parts for value in (part, [np.nan])])


def rolling(values: np.ndarray) -> np.ndarray:
    """Return the means of each value and the nine before it; NaNs are left out."""
    known = np.isfinite(values)
    sums = np.cumsum(np.where(known, values, 0.0))
    counts = np.cumsum(known)
    sums[ROLLING:] -= sums[:-ROLLING].copy()
    counts[ROLLING:] -= counts[:-ROLLING].copy()
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def thinned(curve: Curve, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values of a curve, each the mean of as many neighbours as `width` says."""
    steps, values = (np.array(one, dtype=np.float64) for one in (curve.steps, curve.values))
    starts = np.arange(0, len(steps), width)
    known = np.isfinite(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts)
    counts = np.add.reduceat(known.astype(np.int64), starts)
    sizes = np.diff(np.append(starts, len(steps)))
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return np.add.reduceat(steps, starts) / sizes, means
