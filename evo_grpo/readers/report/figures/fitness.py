"""Figures of the fitness of all agents, over the rounds and against further objectives."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from evo_grpo.readers.report.figures.axes import (
    BOTTOM,
    GREY,
    HEIGHT,
    TOP,
    End,
    Line,
    Look,
    draw,
    error_bars,
    linear,
    name_ends,
    new_figure,
    round_axis,
    set_axis,
)
from evo_grpo.readers.report.figures.points import (
    add_copies,
    add_winner,
    described,
    draw_agent,
    ends_of,
    line_of,
    looks,
    named,
    no_error,
    quiet,
    stretches,
)
from evo_grpo.record.arms import arm_label
from evo_grpo.record.columns import fitness, fitness_se
from evo_grpo.record.family import front
from evo_grpo.record.view import Run, RunView, view_of
from evo_grpo.record.wording import with_error

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from evo_grpo.record.records import AgentRecord
    from evo_grpo.types import Objective

ERROR_BARS = 400
"""Points up to which each has its error bar; with more, the winner's line alone."""


def plot_fitness(run: Run) -> go.Figure:
    """Draw the fitness of all agents over the rounds, with standard errors.

    Dotted lines lead from a parent to the agent that took its weights. Flat lines are results on
    the test split: the base model and, after a comparison, the same population without evolution.

    Args:
        run: A run folder, a `Population`, or its rounds.

    Raises:
        EngineUnavailable: plotly is not installed.
        EvoGrpoError: The folder cannot be read.
    """
    view = view_of(run)
    figure = new_figure("round", "fitness (validation)")
    many = len(list(view.played)) > ERROR_BARS
    text = partial(described, names=view.mutable)
    add_winner(figure, view, fitness, text=text, error=fitness_se if many else no_error)
    for agent, parts in stretches(view).items():
        line = line_of(parts, fitness, text, no_error if many else fitness_se)
        draw_agent(figure, view, agent, line, legend=agent in named(view))
    add_copies(figure, view, fitness)
    flat = _add_flat_lines(figure, view)
    errors = ((one, fitness_se(one)) for one in view.played)
    ends = (
        fitness(one) + (sign * error if error == error else 0.0)
        for one, error in errors
        for sign in (-1, 1)
    )
    scale = linear(ends, include=[end.y for end in flat], least=quiet(view))
    set_axis(figure, "y", scale)
    last = view.rounds[-1].agents if view.rounds else ()
    points = {int(agent.agent): (agent.round + 1.0, fitness(agent)) for agent in last}
    name_ends(figure, [*ends_of(view, points), *flat], scale, HEIGHT - TOP - BOTTOM)
    round_axis(figure, len(view.rounds), free=0.1)
    return figure


def _add_flat_lines(figure: go.Figure, view: RunView) -> list[End]:
    """Draw results on the test split as flat lines."""
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
        line = Line()
        for x in (0.6, last):
            line.add(x, score["mean"], f"{name}: {value} on {score['n']} test prompts")
        draw(figure, line, Look(GREY, dash=dash), f"{name} (test)", "lines", legend=True)
        ends.append(End(last, score["mean"], short))
    return ends


def plot_front(run: Run, objective: str) -> go.Figure:
    """Draw fitness against a further objective, for all agents after all rounds, and the front."""
    view = view_of(run)
    best, seen = front(view.rounds), looks(view)
    measures = [_measure(one, objective) for one in best]
    better = f" ({'smaller' if measures[0].minimize else 'larger'} is better)" if measures else ""
    figure = new_figure(f"{objective}{better}", "fitness")

    def add(line: Line, agent: AgentRecord, error: float = math.nan) -> None:
        found = _measure(agent, objective)
        value = f"{objective} {with_error(found.mean, found.se, 3)}"
        text = f"{described(agent, view.mutable)}<br>{value}"
        line.add(found.mean, fitness(agent), text, error)

    for agent in seen:
        line = Line()
        for one in view.played:
            if one.agent == agent and one.score is not None:
                add(line, one)
        draw_agent(figure, view, agent, line, mode="markers", opacity=0.35)
    line = Line()
    for one in best:
        add(line, one, fitness_se(one))
    marks = [seen[one.agent] for one in best]
    marker = {"symbol": [m.symbol for m in marks], "color": [m.color for m in marks], "size": 11}
    errors = error_bars(np.array([one.se for one in measures]), GREY)
    draw(
        figure, line, Look(GREY, dash="dot"), "front", line_width=1.5, legend=True, marker=marker,
        error_x=errors,
    )  # fmt: skip
    return figure


def _measure(agent: AgentRecord, objective: str) -> Objective:
    assert agent.score is not None, "agents of a front have a score"
    return next(one for one in agent.score.further if one.name == objective)
