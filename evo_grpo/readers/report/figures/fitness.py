"""The fitness of every agent over the rounds."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from evo_grpo.readers.report.figures.axes import linear_span, set_axis
from evo_grpo.readers.report.figures.ends import MARGIN, End, name_ends
from evo_grpo.readers.report.figures.points import (
    Line,
    add_copies,
    agent_name,
    described,
    ends_of,
    looks,
    named,
    stretches,
)
from evo_grpo.readers.report.figures.style import (
    BOTTOM,
    GREY,
    HEIGHT,
    MARKERS,
    TOP,
    WINNER,
    new_figure,
    round_axis,
)
from evo_grpo.record.arms import arm_label
from evo_grpo.record.columns import fitness, fitness_se
from evo_grpo.record.view import Run, RunView, view_of
from evo_grpo.record.wording import with_error

if TYPE_CHECKING:
    import plotly.graph_objects as go

ERROR_BARS = 400
"""Points up to which each has its error bar; with more, the winner's line alone."""


def plot_fitness(run: Run) -> go.Figure:
    """Draw the fitness of every agent over the rounds, with standard errors.

    Each agent has a colour, a marker and a dash. A dotted line leads to an agent from the one whose
    weights it took. Flat lines are results on the test split: the base model and, after a
    comparison, the same population without evolution.

    Args:
        run: A run folder, a `Population`, or its rounds.

    Raises:
        EngineUnavailable: plotly is not installed.
        EvoGrpoError: The folder cannot be read.
    """
    view = view_of(run)
    figure = new_figure("round", "fitness (validation)")
    points = sum(len(record.agents) for record in view.rounds)
    in_legend, seen = named(view), looks(view)
    _add_winner(figure, view, errors=points > ERROR_BARS)
    for agent, parts in stretches(view).items():
        line, look = Line(), seen[agent]
        for part in parts:
            for one in part:
                error = fitness_se(one) if points <= ERROR_BARS else math.nan
                line.add(one.round + 1, fitness(one), described(one, view.mutable), error)
            line.part()
        name = agent_name(agent)
        figure.add_scatter(
            x=line.x, y=line.y, text=line.texts, hoverinfo="text",
            mode="lines+markers", name=name, legendgroup=name, showlegend=agent in in_legend,
            line={"color": look.color, "dash": look.dash, "width": 2},
            marker={"symbol": look.symbol, "maxdisplayed": MARKERS, "size": 7},
            error_y=line.error_bars(look.color),
        )  # fmt: skip
    add_copies(figure, view, fitness)
    ends = _add_flat_lines(figure, view)
    _name_lines(figure, view, ends)
    round_axis(figure, len(view.rounds), free=0.1)
    return figure


def _name_lines(figure: go.Figure, view: RunView, flat: list[End]) -> None:
    """Set the vertical axis, and name agents and flat lines at their ends."""
    played = list(view.played)
    errors = [se for agent in played if math.isfinite(se := fitness_se(agent))]
    values = [
        fitness(agent) + sign * (0.0 if math.isnan(se := fitness_se(agent)) else se)
        for agent in played
        for sign in (-1, 1)
    ]
    # Differences of a few standard errors do not fill the figure.
    least = 8 * median(errors) if errors else 0.0
    span = linear_span(values, include=[end.y for end in flat], least=least)
    set_axis(figure, "y", span)
    last = view.rounds[-1].agents if view.rounds else ()
    points = {int(agent.agent): (agent.round + 1.0, fitness(agent)) for agent in last}
    name_ends(figure, [*ends_of(view, points), *flat], span, HEIGHT - TOP - BOTTOM)
    figure.update_layout(margin_r=MARGIN)


def _add_winner(figure: go.Figure, view: RunView, *, errors: bool) -> None:
    for number, path in enumerate(view.lines):
        line = Line()
        for agent in path:
            error = fitness_se(agent) if errors else math.nan
            text = described(agent, view.mutable)
            line.add(agent.round + 1, fitness(agent), text, error)
        figure.add_scatter(
            x=line.x, y=line.y, text=line.texts, hoverinfo="text", mode="lines",
            name=WINNER, legendgroup="winner", showlegend=number == 0,
            line={"color": GREY, "width": 9}, opacity=0.35,
            error_y=line.error_bars(GREY),
        )  # fmt: skip


def _add_flat_lines(figure: go.Figure, view: RunView) -> list[End]:
    """Draw results on the test split, to compare the fitness of the rounds with."""
    if view.summary is None:
        return []
    flat = [("base model", "base model", view.summary["base"], "dot")]
    compared = view.comparison
    if compared is not None:
        known = {"guess": ("your guess", "dash"), "random": ("random guesses", "dashdot")}
        for arm in compared["arms"]:
            if arm["name"] in known:
                short, dash = known[arm["name"]]
                label = arm_label(arm["name"], compared["agents"])
                flat.append((label, short, arm["test"], dash))
    last = max(1, len(view.rounds))
    ends: list[End] = []
    for name, short, score, dash in flat:
        if score["mean"] is None:
            continue
        value = with_error(score["mean"], score["se"], 3)
        text = f"{name}: {value} on {score['n']} test prompts"
        figure.add_scatter(
            x=[0.6, last], y=[score["mean"]] * 2, text=[text] * 2, hoverinfo="text",
            mode="lines", name=f"{name} (test)",
            line={"color": GREY, "width": 2, "dash": dash},
        )  # fmt: skip
        ends.append(End(last, score["mean"], short))
    return ends
