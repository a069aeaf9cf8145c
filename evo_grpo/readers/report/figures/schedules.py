"""The hyperparameters of the agents by round, and the change of fitness that went with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from evo_grpo.readers.report.figures.axes import linear_span, log_span, set_axis, spans_a_decade
from evo_grpo.readers.report.figures.ends import MARGIN, name_ends
from evo_grpo.readers.report.figures.points import (
    Line,
    add_copies,
    agent_name,
    brief,
    copies,
    ends_of,
    looks,
    named,
    stretches,
    survivors,
)
from evo_grpo.readers.report.figures.style import (
    GREY,
    MARKERS,
    WINNER,
    Look,
    graph_objects,
    layout,
    new_figure,
    round_axis,
)
from evo_grpo.record.columns import fitness, fitness_se, was_evaluated
from evo_grpo.record.records import AgentRecord
from evo_grpo.record.view import Run, RunView, view_of
from evo_grpo.schema.shown import short_name, shown_value

if TYPE_CHECKING:
    import plotly.graph_objects as go

ROW = 240
"""Pixels of height for each hyperparameter."""
GAP = 24
"""Pixels between two rows."""


def plot_schedules(run: Run, names: Sequence[str] | None = None) -> go.Figure:
    """Draw the hyperparameters of all agents over the rounds, one row for each hyperparameter.

    Agents of the last round are drawn strong, agents that left faint, the winner's line broad. A
    dotted line leads to an agent from the one whose weights it took. An axis is logarithmic where
    its values span a factor of 10.

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
    spacing = GAP / (ROW * rows)
    figure = make_subplots(rows=rows, cols=1, shared_xaxes=True, vertical_spacing=spacing)
    figure.update_layout(**layout(80 + ROW * rows))
    parts, lines, seen = stretches(view), view.lines, looks(view)
    playing = set(survivors(view))
    pixels = ROW - GAP
    for row, name in enumerate(chosen, start=1):
        value_of = heights(view, name)
        for number, line in enumerate(lines):
            figure.add_scatter(
                x=[agent.round + 1 for agent in line], y=[value_of(agent) for agent in line],
                mode="lines", hoverinfo="skip", name=WINNER, legendgroup="winner",
                showlegend=row == 1 and number == 0, line={"color": GREY, "width": 9},
                opacity=0.35, row=row, col=1,
            )  # fmt: skip
        for agent, own in parts.items():
            _add_schedule(figure, seen[agent], own, name, value_of, row, faint=agent not in playing)
        add_copies(figure, view, value_of, row=row, col=1)
        values = [value_of(agent) for agent in view.played]
        log = spans_a_decade(values) and not names_of(view, name)
        span = log_span(values) if log else linear_span(values)
        figure.update_yaxes(title_text=short_name(name), row=row, col=1)
        set_axis(figure, "y", span, log=log, names=names_of(view, name), row=row, col=1)
        points = {agent: (own[-1][-1].round + 1.0, value_of(own[-1][-1]))
                  for agent, own in parts.items()}  # fmt: skip
        name_ends(figure, ends_of(view, points), span, pixels, log=log, row=row, col=1)
    round_axis(figure, len(view.rounds), title="", free=0.1)
    figure.update_xaxes(title_text="round", row=rows, col=1)
    figure.update_layout(margin_r=MARGIN)
    _add_names(figure, view, parts)
    return figure


def plot_improvement(run: Run, name: str) -> go.Figure:
    """Draw the change of fitness between two evaluations against the value of a hyperparameter.

    The change is from the weights that the agent had in the evaluation before, its own or those of
    the agent that it was copied from. Rounds without evaluations count as parts of the next one.

    Args:
        run: A run folder, a `Population`, or its rounds.
        name: A hyperparameter.

    Raises:
        EngineUnavailable: plotly is not installed.
        EvoGrpoError: The folder cannot be read.
    """
    view = view_of(run)
    figure = new_figure(short_name(name), "change of fitness between evaluations", height=320)
    pairs: dict[int, list[tuple[AgentRecord, AgentRecord]]] = {
        agent: [pair for part in own for pair in pairwise(filter(was_evaluated, part))]
        for agent, own in stretches(view).items()
    }
    for parent, agent in copies(view):
        own = next(part for part in stretches(view)[agent.agent] if part[0] is agent)
        after = next(filter(was_evaluated, own), None)
        if was_evaluated(parent) and after is not None:
            pairs[agent.agent].append((parent, after))
    values: list[float] = []
    gains: list[float] = []
    in_legend, seen, value_of = named(view), looks(view), heights(view, name)
    for agent, own in pairs.items():
        line = Line()
        for before, after in own:
            gain, value = fitness(after) - fitness(before), value_of(after)
            if math.isfinite(gain) and math.isfinite(value):
                line.add(value, gain, brief(after, name))
                values.append(value)
                gains.append(gain)
        look, title = seen[agent], agent_name(agent)
        figure.add_scatter(
            x=line.x, y=line.y, text=line.texts, hoverinfo="text", mode="markers",
            name=title, legendgroup=title, showlegend=agent in in_legend,
            marker={"color": look.color, "symbol": look.symbol, "size": 9, "opacity": 0.8,
                    "maxdisplayed": 4 * MARKERS},
        )  # fmt: skip
    if values:
        log = spans_a_decade(values) and not names_of(view, name)
        span = log_span(values) if log else linear_span(values)
        set_axis(figure, "x", span, log=log, names=names_of(view, name))
        # Differences of a few standard errors do not fill the figure.
        errors = [error for one in view.played if math.isfinite(error := fitness_se(one))]
        least = 8 * median(errors) if errors else 0.0
        set_axis(figure, "y", linear_span(gains, include=[0.0], least=least))
    return figure


def drawn_names(view: RunView) -> list[str]:
    """Return the hyperparameters that a run's figures show: those that may mutate, or lr."""
    return list(view.mutable) or ["lr"]


def names_of(view: RunView, name: str) -> list[str]:
    """Return the values of a hyperparameter that are names, in the order in which they came up.

    Those of a hyperparameter that is true or false are "true" and "false".
    """
    values = (agent.hparams.get(name) for agent in view.played)
    names = (shown_value(value) for value in values if isinstance(value, str | bool))
    return list(dict.fromkeys(names))


def heights(view: RunView, name: str) -> Callable[[AgentRecord], float]:
    """Return the function from an agent to its value of a hyperparameter.

    For a name it is the place in `names_of`, 1 for the first; it is NaN without a value.
    """
    places = {value: float(place) for place, value in enumerate(names_of(view, name), start=1)}

    def height(agent: AgentRecord) -> float:
        value = agent.hparams.get(name)
        if isinstance(value, str | bool):
            return places[shown_value(value)]
        return math.nan if value is None else float(value)

    return height


def _add_schedule(
    figure: go.Figure,
    look: Look,
    parts: Sequence[Sequence[AgentRecord]],
    name: str,
    value_of: Callable[[AgentRecord], float],
    row: int,
    *,
    faint: bool,
) -> None:
    line = Line()
    for part in parts:
        for one in part:
            line.add(one.round + 1, value_of(one), brief(one, name))
        line.part()
    title = agent_name(parts[0][0].agent)
    figure.add_scatter(
        x=line.x, y=line.y, text=line.texts, hoverinfo="text", mode="lines+markers",
        name=title, legendgroup=title, showlegend=False, opacity=0.35 if faint else 1.0,
        line={"color": look.color, "dash": look.dash, "width": 1 if faint else 2.5},
        marker={"symbol": look.symbol, "maxdisplayed": MARKERS, "size": 5 if faint else 8},
        row=row, col=1,
    )  # fmt: skip


def _add_names(figure: go.Figure, view: RunView, agents: Iterable[int]) -> None:
    """Name the agents in the legend, once for all rows."""
    in_legend, seen = named(view), looks(view)
    for agent in agents:
        if agent not in in_legend:
            continue
        look, title = seen[agent], agent_name(agent)
        figure.add_scatter(
            x=[None], y=[None], mode="lines+markers", name=title, legendgroup=title,
            line={"color": look.color, "dash": look.dash}, marker={"symbol": look.symbol},
            row=1, col=1,
        )  # fmt: skip
