"""The hyperparameters of the agents by round, and the change of fitness that went with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from evo_grpo.readers.report.figures.points import Line, brief, lineage_name, named, stretches
from evo_grpo.readers.report.figures.style import (
    GREY,
    MARKERS,
    WINNER,
    Look,
    graph_objects,
    layout,
    look_of,
    new_figure,
    round_axis,
)
from evo_grpo.record.columns import fitness
from evo_grpo.record.records import AgentRecord
from evo_grpo.record.view import Run, RunView, view_of
from evo_grpo.schema.shown import short_name

if TYPE_CHECKING:
    import plotly.graph_objects as go

ROW = 240
"""Pixels of height for each hyperparameter."""
DECADE = 10.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""


def plot_schedules(run: Run, names: Sequence[str] | None = None) -> go.Figure:
    """Draw the hyperparameters of all agents over the rounds, one row for each hyperparameter.

    Agents of the last round are drawn strong, agents that left faint, the winner's line broad. An
    axis is logarithmic where its values span a factor of 10.

    Args:
        run: A run folder, a `Population`, or its rounds.
        names: Hyperparameters; None takes those that may mutate, or lr where none may.

    Raises:
        EngineUnavailable: plotly is not installed.
        EvoGrpoError: The folder cannot be read.
    """
    view = view_of(run)
    graph_objects("plot_schedules")
    from plotly.subplots import make_subplots

    chosen = list(names) if names is not None else drawn_names(view)
    rows = max(1, len(chosen))
    figure = make_subplots(rows=rows, cols=1, shared_xaxes=True, vertical_spacing=0.08 / rows)
    figure.update_layout(**layout(80 + ROW * rows))
    parts, lines = stretches(view), view.lines
    last = view.rounds[-1].round if view.rounds else 0
    for row, name in enumerate(chosen, start=1):
        for index, own in enumerate(parts.values()):
            for left in (True, False):
                drawn = [part for part in own if (part[-1].round < last) is left]
                if drawn:
                    _add_schedule(figure, drawn, name, look_of(index), row=row, faint=left)
        for number, line in enumerate(lines):
            figure.add_scatter(
                x=[agent.round + 1 for agent in line], y=[value_of(agent, name) for agent in line],
                mode="lines", hoverinfo="skip", name=WINNER, legendgroup="winner",
                showlegend=row == 1 and number == 0, line={"color": GREY, "width": 9},
                opacity=0.4, row=row, col=1,
            )  # fmt: skip
        values = [value_of(a, name) for r in view.rounds for a in r.agents]
        log = spans_a_decade(values)
        figure.update_yaxes(
            title_text=short_name(name), type="log" if log else "linear", row=row, col=1
        )
    round_axis(figure, len(view.rounds), title="")
    figure.update_xaxes(title_text="round", row=rows, col=1)
    _add_names(figure, view, parts)
    return figure


def plot_improvement(run: Run, name: str) -> go.Figure:
    """Draw the change of fitness in a round against the value of a hyperparameter.

    Args:
        run: A run folder, a `Population`, or its rounds.
        name: A hyperparameter.

    Raises:
        EngineUnavailable: plotly is not installed.
        EvoGrpoError: The folder cannot be read.
    """
    view = view_of(run)
    figure = new_figure(short_name(name), "change of fitness in a round", height=320)
    values: list[float] = []
    lineages = stretches(view)
    in_legend = named(lineages)
    for index, (founder, own) in enumerate(lineages.items()):
        line = Line()
        for before, after in (pair for part in own for pair in pairwise(part)):
            gain, value = fitness(after) - fitness(before), value_of(after, name)
            if math.isfinite(gain) and math.isfinite(value):
                line.add(value, gain, brief(after, name))
                values.append(value)
        look = look_of(index)
        figure.add_scatter(
            x=line.x, y=line.y, text=line.texts, hoverinfo="text", mode="markers",
            name=lineage_name(view, founder), showlegend=founder in in_legend,
            marker={"color": look.color, "symbol": look.symbol, "size": 9, "opacity": 0.8,
                    "maxdisplayed": 4 * MARKERS},
        )  # fmt: skip
    figure.update_xaxes(type="log" if spans_a_decade(values) else "linear")
    return figure


def drawn_names(view: RunView) -> list[str]:
    """Return the hyperparameters that a run's figures show: those that may mutate, or lr."""
    return list(view.mutable) or ["lr"]


def value_of(agent: AgentRecord, name: str) -> float:
    """Return an agent's value of a hyperparameter, NaN where it is not a number."""
    value = agent.hparams.get(name)
    return math.nan if value is None else float(value)


def spans_a_decade(values: Sequence[float]) -> bool:
    """Return whether positive values span a factor of 10."""
    known = [value for value in values if math.isfinite(value)]
    return bool(known) and min(known) > 0 and max(known) >= DECADE * min(known)


def _add_schedule(
    figure: go.Figure,
    parts: Sequence[Sequence[AgentRecord]],
    name: str,
    look: Look,
    *,
    row: int,
    faint: bool,
) -> None:
    line = Line()
    for part in parts:
        for agent in part:
            line.add(agent.round + 1, value_of(agent, name), brief(agent, name))
        line.part()
    figure.add_scatter(
        x=line.x, y=line.y, text=line.texts, hoverinfo="text", mode="lines+markers",
        showlegend=False, opacity=0.35 if faint else 1.0,
        line={"color": look.color, "dash": look.dash, "width": 1 if faint else 2.5},
        marker={"symbol": look.symbol, "maxdisplayed": MARKERS, "size": 5 if faint else 8},
        row=row, col=1,
    )  # fmt: skip


def _add_names(
    figure: go.Figure, view: RunView, lineages: Mapping[int, list[list[AgentRecord]]]
) -> None:
    """Name the lineages in the legend, once for all rows."""
    in_legend = named(lineages)
    for index, founder in enumerate(lineages):
        if founder not in in_legend:
            continue
        look = look_of(index)
        figure.add_scatter(
            x=[None], y=[None], mode="lines+markers", name=lineage_name(view, founder),
            line={"color": look.color, "dash": look.dash}, marker={"symbol": look.symbol},
            row=1, col=1,
        )  # fmt: skip
