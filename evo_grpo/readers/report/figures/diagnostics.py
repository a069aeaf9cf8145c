"""The metrics of training by step, one figure for each metric.

Without metrics of steps, the curves show the means of rounds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from evo_grpo.readers.report.figures.points import lineage_name
from evo_grpo.readers.report.figures.style import (
    MARKERS,
    graph_objects,
    layout,
    look_of,
    new_figure,
)
from evo_grpo.record.step_metrics import metric_rows
from evo_grpo.record.view import Run, RunView, view_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

ROLLING = 10
"""Steps of a rolling mean."""
POINTS = 6000
"""Points of a figure; with more, each drawn point is the mean of several neighbours."""
FEW = 13
"""Points of a curve up to which each point has a marker; the gap behind it counts."""
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
"""Metrics in the order in which they are drawn; the rewards of single functions follow `reward`."""
COLUMNS, ROW = 2, 240
_PREFIX = "reward/"


@dataclass
class Curve:
    """One metric of one agent, as long as its weights are of one lineage.

    Attributes:
        founder: The member of the first population that it descends from.
        steps: GRPO steps since the start of the run, counted from 1.
        values: The metric, NaN where a step has none.
    """

    founder: int
    steps: list[int] = field(default_factory=list[int])
    values: list[float] = field(default_factory=list[float])


Curves = dict[str, list[Curve]]
"""Curves by the names of their metrics."""


def plot_diagnostics(run: Run, names: Sequence[str] | None = None) -> go.Figure:
    """Draw the metrics of training over its steps, a small figure for each metric.

    Rewards are drawn as rolling means over 10 steps, over the values themselves. A run without
    metrics of its steps is drawn by the means of its rounds.

    Args:
        run: A run folder, a `Population`, or its rounds.
        names: Metrics; None takes all that the run has.

    Raises:
        EngineUnavailable: plotly is not installed.
        EvoGrpoError: The folder cannot be read.
    """
    view = view_of(run)
    graph_objects("plot_diagnostics")
    from plotly.subplots import make_subplots

    measured = curves(view)
    chosen = list(names) if names is not None else metric_names(measured)
    rows = max(1, -(-len(chosen) // COLUMNS))
    titles = [label(name) for name in chosen]
    figure = make_subplots(rows=rows, cols=COLUMNS, subplot_titles=titles, shared_xaxes=False)
    figure.update_layout(**layout(60 + ROW * rows))
    for number, name in enumerate(chosen):
        row, column = divmod(number, COLUMNS)
        place = {"row": row + 1, "col": column + 1}
        _add_curves(figure, view, measured.get(name, []), name, legend=number == 0, **place)
    figure.update_xaxes(title_text="step")
    return figure


def plot_metric(view: RunView, measured: Curves, name: str) -> go.Figure:
    """Draw one metric; see `plot_diagnostics`."""
    figure = new_figure("step", "", height=260)
    _add_curves(figure, view, measured.get(name, []), name, legend=False)
    title = {"text": label(name), "font": {"size": 13}}
    figure.update_layout(title=title, showlegend=False, margin={"t": 36})
    return figure


def label(name: str) -> str:
    """Return the title of a metric in a figure."""
    if name.startswith(_PREFIX):
        return f"reward by {name.removeprefix(_PREFIX)}"
    return LABELS.get(name, name.replace("_", " "))


def _add_curves(
    figure: go.Figure,
    view: RunView,
    own: Sequence[Curve],
    name: str,
    *,
    legend: bool,
    **place: int,
) -> None:
    """Draw the curves of a metric: a trace for each lineage, with gaps between agents."""
    # In the order of the lineages in every other figure.
    looks = {one: look_of(i) for i, one in enumerate(sorted(set(view.founders.values())))}
    width = max(1, math.ceil(sum(len(curve.steps) for curve in own) / POINTS))
    for founder in sorted({curve.founder for curve in own}):
        drawn = [thinned(curve, width) for curve in own if curve.founder == founder]
        x = joined([steps for steps, _ in drawn])
        look, title = looks[founder], lineage_name(view, founder)
        smooth = [values for _, values in drawn]
        if name.startswith("reward"):
            figure.add_scatter(
                x=x, y=joined(smooth), mode="markers", hoverinfo="skip", showlegend=False,
                legendgroup=title, opacity=0.3,
                marker={"color": look.color, "symbol": look.symbol, "size": 4,
                        "maxdisplayed": 4 * MARKERS},
                **place,
            )  # fmt: skip
            smooth = [rolling(values) for values in smooth]
        many = len(x) > FEW * len(drawn)
        figure.add_scatter(
            x=x, y=joined(smooth), mode="lines" if many else "lines+markers",
            name=title, legendgroup=title, showlegend=legend,
            line={"color": look.color, "dash": look.dash, "width": 2},
            marker={"symbol": look.symbol, "size": 6, "maxdisplayed": MARKERS},
            hovertemplate="step %{x}: %{y:.4g}<extra>" + title + "</extra>",
            **place,
        )  # fmt: skip


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return curves concatenated, with NaN between them."""
    return np.concatenate([value for part in parts for value in (part, [np.nan])])


def rolling(values: np.ndarray) -> np.ndarray:
    """Return the means of each value and the nine before it; NaNs are left out."""
    import pandas as pd

    return pd.Series(values).rolling(ROLLING, min_periods=1).mean().to_numpy()


def thinned(curve: Curve, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values of a curve, each the mean of as many neighbours as `width` says."""
    import pandas as pd

    frame = pd.DataFrame({"steps": curve.steps, "values": curve.values}, dtype="float64")
    means = frame.groupby(np.arange(len(frame)) // width).mean()
    return means["steps"].to_numpy(), means["values"].to_numpy()


def curves(view: RunView) -> Curves:
    """Return the metrics of a run by name, a curve for each agent and lineage."""
    rows = [] if view.folder is None else metric_rows(view.folder)
    founders = view.founders
    whose = {(r.round, int(a.agent)): founders[a.member] for r in view.rounds for a in r.agents}
    found: dict[str, dict[tuple[int, int], Curve]] = defaultdict(dict)
    points = _of_steps(rows, view.steps_per_round) if rows else _of_rounds(view)
    for round, agent, step, name, value in points:
        founder = whose.get((round, agent))
        if founder is not None:  # None in a round that is not recorded yet
            curve = found[name].setdefault((agent, founder), Curve(founder))
            curve.steps.append(step)
            curve.values.append(math.nan if value is None else float(value))
    return {name: list(own.values()) for name, own in found.items()}


def metric_names(measured: Curves) -> list[str]:
    """Return the metrics that are drawn, in order: those whose values differ."""
    worth = [name for name, own in measured.items() if _differ(own)]
    functions = sorted(name for name in worth if name.startswith(_PREFIX))
    ordered = [name for name in LABELS if name in worth]
    return [*ordered[:1], *functions, *ordered[1:]]


def _differ(own: Iterable[Curve]) -> bool:
    known = (value for curve in own for value in curve.values if math.isfinite(value))
    first = next(known, None)
    return any(value != first for value in known)


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
    """Yield the means of rounds at their last steps, and the rewards of steps, which they keep."""
    for record in view.rounds:
        first = record.round * view.steps_per_round + 1
        for agent in record.agents:
            for step, reward in enumerate(agent.step_rewards, start=first):
                yield record.round, agent.agent, step, "reward", reward
            last = first + view.steps_per_round - 1
            for name, value in agent.metrics.items():
                if _drawn(name) and not (name == "reward" and agent.step_rewards):
                    yield record.round, agent.agent, last, name, value
