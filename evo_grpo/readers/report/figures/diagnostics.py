"""Draws the metrics of training by step, and time and tokens by round."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from evo_grpo.readers.report.figures import axes
from evo_grpo.readers.report.figures.traces import agent_name, draw_agent, ends_of, stretches
from evo_grpo.record.history import metric_rows
from evo_grpo.record.view import Run, RunView, view_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

ROLLING = 10
"""Number of steps of which a rolling mean is taken."""
POINTS = 6000
"""Most points of a metric that are drawn; with more, a drawn point is the mean of neighbours."""
FEW = 13
"""Number of points of an agent up to which all points have markers."""
LABELS = {
    "reward": "reward",
    "loss": "loss",
    "kl": "KL from the base (nats per token)",
    "zero_variance": "groups of equal rewards (share)",
    "clip_fraction": "tokens clipped (share)",
    "entropy": "entropy (nats per token)",
    "completion_length": "completion length (tokens)",
    "ended": "completions that ended (share)",
    "sampler_gap": "gap of sampler's log-probs (nats)",
    "grad_norm": "gradient norm",
    "ratio_max": "largest probability ratio",
}
"""Metric -> title, in the order of drawing; rewards of single functions come after `reward`."""
SHOWN = {
    "kl": (0.0, 0.01),
    "zero_variance": (0.0, 1.0),
    "clip_fraction": (0.0, 0.05),
    "entropy": (0.0, 0.1),
    "completion_length": (0.0, 1.0),
    "ended": (0.0, 1.0),
    "sampler_gap": (0.0, 0.001),
    "grad_norm": (0.0, 0.1),
    "ratio_max": (0.0, 2.0),
}
"""Metric -> values that its axis always includes, so that rounding and noise look small."""
QUIET = 8
"""Least span of a metric's axis, in standard deviations of the noise from step to step."""
COLUMNS, ROW, HEIGHT, TITLE = 2, 260, 260, 36
BETWEEN, ABOVE = 80, 80
"""Pixels between two rows of subplots, and above the first row, for titles and the legend."""
_PREFIX = "reward/"
PATTERNS = ("", "/", "x", ".", "\\", "+", "-", "|")
"""Plotly's names of patterns, which distinguish bars without colours."""


@dataclass
class Curve:
    """One metric of one agent, until the agent leaves or takes the weights of another agent.

    `steps` count from 1 since the start of the run; `values` are NaN for steps without a value.
    """

    agent: int
    steps: list[int] = field(default_factory=list[int])
    values: list[float] = field(default_factory=list[float])


Curves = dict[str, list[Curve]]
"""Name of a metric -> its curves."""


def plot_diagnostics(run: Run, names: Sequence[str] | None = None) -> go.Figure:
    """Draw the metrics of training over the steps, with a subplot for each metric.

    Rewards are drawn as rolling means over 10 steps, with the single values behind them. A run
    without metrics of steps is drawn with the means of its rounds.

    Args:
        run: A run folder, a `Population`, or its rounds.
        names: Names of metrics; None takes all that the run has.
    """
    view = view_of(run)
    measured = curves(view)
    metrics = list(names) if names is not None else metric_names(measured)
    rows = max(1, -(-len(metrics) // COLUMNS))
    plot_height = ROW * rows - BETWEEN
    figure = axes.new_figure(
        height=plot_height + ABOVE + axes.BOTTOM, rows=rows, cols=COLUMNS, shared_xaxes=False,
        subplot_titles=[label(name) for name in metrics],
        horizontal_spacing=0.18, vertical_spacing=BETWEEN / plot_height,
    )  # fmt: skip
    figure.update_layout(margin={"t": ABOVE, "r": axes.MARGIN}, legend_y=1 + 28 / plot_height)
    in_legend: set[int] = set()
    for number, name in enumerate(metrics):
        row, column = divmod(number, COLUMNS)
        place = {"row": row + 1, "col": column + 1}
        _add_curves(figure, view, measured.get(name, []), name, in_legend, ROW - BETWEEN, place)
    figure.update_xaxes(title_text="step")
    return figure


def plot_metric(view: RunView, measured: Curves, name: str) -> go.Figure:
    """Draw the curves of one metric as a figure, in the style of `plot_diagnostics`."""
    figure = axes.new_figure("step", "", height=HEIGHT)
    title = {"text": label(name), "font": {"size": 13}, "x": 0, "xref": "paper"}
    figure.update_layout(title=title, showlegend=False, margin_t=TITLE)
    _add_curves(figure, view, measured.get(name, []), name, set(), HEIGHT - TITLE - axes.BOTTOM)
    return figure


def label(name: str) -> str:
    """Return the title of a metric in a figure."""
    if name.startswith(_PREFIX):
        return f"reward by {name.removeprefix(_PREFIX)}"
    return LABELS.get(name, name.replace("_", " "))


def _add_curves(
    figure: go.Figure,
    view: RunView,
    metric_curves: Sequence[Curve],
    name: str,
    in_legend: set[int],
    pixels: float,
    place: axes.Place = axes.ALONE,
) -> None:
    """Draw a metric: a trace for each agent, with gaps where the agent takes other weights.

    Agents that are not `in_legend` are added to the legend. `pixels` is the height of the axis.
    """
    width = max(1, math.ceil(sum(len(curve.steps) for curve in metric_curves) / POINTS))
    points: dict[int, tuple[float, float]] = {}
    for agent in sorted({curve.agent for curve in metric_curves}):
        thin_curves = [thinned(curve, width) for curve in metric_curves if curve.agent == agent]
        x = joined([steps for steps, _ in thin_curves])
        smooth = [values for _, values in thin_curves]
        if name.startswith("reward"):
            draw_agent(
                figure, view, agent, axes.Line(x, joined(smooth)), mode="markers", opacity=0.3,
                marker_size=4, marker_maxdisplayed=4 * axes.MARKERS, place=place,
            )  # fmt: skip
            smooth = [rolling(values) for values in smooth]
        lengths = [len(steps) for steps, _ in thin_curves]
        # A line of a single point is invisible without its marker.
        lines_only = sum(lengths) > FEW and min(lengths) > 1
        title = agent_name(agent)
        draw_agent(
            figure, view, agent, axes.Line(x, joined(smooth)), legend=agent not in in_legend,
            mode="lines" if lines_only else "lines+markers", marker_size=6, place=place,
            hoverinfo="all",
            hovertemplate="step %{x}: %{y:.4g}<extra>" + title + "</extra>",
        )  # fmt: skip
        in_legend.add(agent)
        points[agent] = _last(thin_curves[-1][0], smooth[-1])
    scale = scale_of_metric(name, metric_curves)
    axes.set_axis(figure, "y", scale, place)
    last_step = max((curve.steps[-1] for curve in metric_curves), default=1)
    # The names behind the ends lie in the margin: the axis ends with the curves.
    axes.set_axis(figure, "x", axes.Scale(0.0, last_step), place)
    axes.name_ends(figure, ends_of(view, points), scale, pixels, place)


def _last(steps: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Return the step and the value of a curve's last point with a finite value."""
    finite = np.flatnonzero(np.isfinite(values))
    return (float(steps[finite[-1]]), float(values[finite[-1]])) if len(finite) else (0.0, math.nan)


def scale_of_metric(name: str, metric_curves: Sequence[Curve]) -> axes.Scale:
    """Return the scale of a metric's vertical axis."""
    values = (value for curve in metric_curves for value in curve.values)
    if name in SHOWN:
        return axes.linear(values, include=SHOWN[name])
    return axes.linear(values, least=QUIET * axes.noise(curve.values for curve in metric_curves))


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the parts of a curve, with NaN after each, so that gaps are drawn."""
    return np.concatenate([value for part in parts for value in (part, [np.nan])])


def rolling(values: np.ndarray) -> np.ndarray:
    """Return, for each value, the mean of it and the nine values before; NaNs are left out."""
    import pandas as pd

    return pd.Series(values).rolling(ROLLING, min_periods=1).mean().to_numpy()


def thinned(curve: Curve, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values of a curve, each averaged over blocks of `width` neighbours."""
    steps, values = (np.array(column, dtype=np.float64) for column in (curve.steps, curve.values))
    if width == 1:
        return steps, values
    firsts = np.arange(0, len(steps), width)
    is_finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):  # a mean of no values is NaN
        means = np.add.reduceat(np.where(is_finite, values, 0.0), firsts) / np.add.reduceat(
            is_finite, firsts, dtype=np.float64
        )
    sizes = np.diff(np.append(firsts, len(steps)))
    return np.add.reduceat(steps, firsts) / sizes, means


def curves(view: RunView) -> Curves:
    """Return the curves of each metric; an agent has a new curve whenever it gets other weights."""
    rows = [] if view.folder is None else metric_rows(view.folder, len(view.rounds))
    stretch_numbers = {
        (record.round, int(agent)): number
        for agent, agent_stretches in stretches(view).items()
        for number, stretch in enumerate(agent_stretches)
        for record in stretch
    }
    by_metric: dict[str, dict[tuple[int, int], Curve]] = defaultdict(dict)
    points = _of_steps(rows, view.steps_per_round) if rows else _of_rounds(view)
    for round, agent, step, name, value in points:
        number = stretch_numbers.get((round, agent))
        if number is not None:  # None in a round that is not recorded yet
            curve = by_metric[name].setdefault((agent, number), Curve(agent))
            curve.steps.append(step)
            curve.values.append(math.nan if value is None else float(value))
    return {name: list(by_stretch.values()) for name, by_stretch in by_metric.items()}


def metric_names(measured: Curves) -> list[str]:
    """Return the metrics to draw, in order; metrics whose values are all equal are left out."""
    varying = [name for name, metric_curves in measured.items() if _differ(metric_curves)]
    functions = sorted(name for name in varying if name.startswith(_PREFIX))
    ordered = [name for name in LABELS if name in varying]
    return [*ordered[:1], *functions, *ordered[1:]]


def _differ(metric_curves: Iterable[Curve]) -> bool:
    values = (value for curve in metric_curves for value in curve.values if math.isfinite(value))
    first_value = next(values, None)
    return any(value != first_value for value in values)


def _drawn(name: str) -> bool:
    return name in LABELS or name.startswith(_PREFIX)


_Point = tuple[int, int, int, str, float | None]
"""Round, agent, step since the start of the run (from 1), metric and value."""


def _of_steps(rows: Iterable[Mapping[str, Any]], per_round: int) -> Iterator[_Point]:
    for row in rows:
        step = row["round"] * per_round + row["step"] + 1
        for name, value in row.items():
            if _drawn(name):
                yield row["round"], row["agent"], step, name, value


def _of_rounds(view: RunView) -> Iterator[_Point]:
    """Yield the mean metrics of each round, as of its last step, and the recorded step rewards."""
    for record in view.rounds:
        first_step = record.round * view.steps_per_round + 1
        for agent in record.agents:
            for step, reward in enumerate(agent.step_rewards, start=first_step):
                yield record.round, agent.agent, step, "reward", reward
            last_step = first_step + view.steps_per_round - 1
            for name, value in agent.metrics.items():
                if _drawn(name) and not (name == "reward" and agent.step_rewards):
                    yield record.round, agent.agent, last_step, name, value


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
    figure = axes.new_figure("round", title, height=320)
    count = max(map(len, values.values()), default=0)
    for index, (name, heights) in enumerate(values.items()):
        figure.add_bar(
            x=list(range(1, count + 1)), y=heights, name=name,
            hovertemplate=f"round %{{x}}, {name}: {shown}<extra></extra>",
            marker={"color": axes.COLORS[index % len(axes.COLORS)],
                    "pattern": {"shape": PATTERNS[index % len(PATTERNS)], "solidity": 0.3}},
        )  # fmt: skip
    figure.update_layout(barmode="stack")
    figure.update_yaxes(exponentformat="none", separatethousands=True)
    axes.round_axis(figure, count)
    return figure
