"""The fitness of every agent over the rounds, by lineage."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from evo_grpo.readers.report.figures.points import Line, described, lineage_name, named, stretches
from evo_grpo.readers.report.figures.style import (
    GREY,
    MARKERS,
    WINNER,
    look_of,
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

    Colours, markers and dashes tell the lineages apart, each named after the agent of the first
    round that it descends from. Flat lines are results on the test split: the base model and, after
    a comparison, the same population without evolution.

    Args:
        run: A run folder, a `Population`, or its rounds.

    Raises:
        EngineUnavailable: plotly is not installed.
        EvoGrpoError: The folder cannot be read.
    """
    view = view_of(run)
    figure = new_figure("round", "fitness (validation)")
    points = sum(len(record.agents) for record in view.rounds)
    lineages = stretches(view)
    in_legend = named(lineages)
    for index, (founder, parts) in enumerate(lineages.items()):
        line = Line()
        for part in parts:
            for agent in part:
                error = fitness_se(agent) if points <= ERROR_BARS else math.nan
                text = described(agent, view.mutable)
                line.add(agent.round + 1, fitness(agent), text, error)
            line.part()
        look = look_of(index)
        figure.add_scatter(
            x=line.x, y=line.y, text=line.texts, hoverinfo="text",
            mode="lines+markers", name=lineage_name(view, founder),
            showlegend=founder in in_legend,
            line={"color": look.color, "dash": look.dash, "width": 1.5},
            marker={"symbol": look.symbol, "maxdisplayed": MARKERS, "size": 7},
            error_y=line.error_bars(look.color),
            opacity=0.85,
        )  # fmt: skip
    _add_winner(figure, view, errors=points > ERROR_BARS)
    _add_flat_lines(figure, view)
    round_axis(figure, len(view.rounds))
    return figure


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
            line={"color": GREY, "width": 7}, opacity=0.45,
            error_y=line.error_bars(GREY),
        )  # fmt: skip


def _add_flat_lines(figure: go.Figure, view: RunView) -> None:
    """Draw results on the test split, to compare the fitness of the rounds with."""
    if view.summary is None:
        return
    flat = [("base model", view.summary["base"], "dot")]
    compared = view.comparison
    if compared is not None:
        dashes = {"guess": "dash", "random": "dashdot"}
        flat += [
            (arm_label(arm["name"], compared["agents"]), arm["test"], dashes[arm["name"]])
            for arm in compared["arms"]
            if arm["name"] in dashes
        ]
    last = max(1, len(view.rounds))
    for name, score, dash in flat:
        if score["mean"] is None:
            continue
        value = with_error(score["mean"], score["se"], 3)
        text = f"{name}: {value} on {score['n']} test prompts"
        figure.add_scatter(
            x=[0.6, last + 0.4], y=[score["mean"]] * 2, text=[text] * 2, hoverinfo="text",
            mode="lines", name=f"{name} (test)",
            line={"color": GREY, "width": 2, "dash": dash},
        )  # fmt: skip
