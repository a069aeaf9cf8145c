"""Draws fitness, Pareto fronts and hyperparameters over the rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from evo_grpo.readers.report.figures import axes, traces
from evo_grpo.record import arms, family, wording
from evo_grpo.record.columns import fitness, fitness_se, was_evaluated
from evo_grpo.record.records import AgentRecord
from evo_grpo.record.view import Run, RunView, view_of
from evo_grpo.schema.problems import short_name

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from evo_grpo.types import Objective

ERROR_BARS = 400
"""Greatest number of points with error bars; with more points, only the winner's line has them."""
ROW = 240
"""Pixels of height for each hyperparameter."""
GAP = 24
"""Pixels between the rows of two hyperparameters."""


def plot_fitness(run: Run) -> go.Figure:
    """Draw the fitness of all agents over the rounds, with standard errors.

    Dotted lines lead from a parent to the agent that took its weights. Flat lines are results on
    the test split: the base model and, after a comparison, the same population without evolution.

    Args:
        run: A run folder, a `Population`, or its rounds.
    """
    view = view_of(run)
    figure = axes.new_figure("round", "fitness (validation)")
    is_crowded = len(list(view.played)) > ERROR_BARS
    text = partial(traces.described, names=view.mutable)
    traces.add_winner(figure, view, fitness, text=text, error=fitness_se if is_crowded else None)
    for agent, parts in traces.stretches(view).items():
        line = traces.line_of(parts, fitness, text, None if is_crowded else fitness_se)
        traces.draw_agent(figure, view, agent, line, legend=agent in traces.named(view))
    traces.add_copies(figure, view, fitness)
    flat = _add_flat_lines(figure, view)
    errors = ((record, fitness_se(record)) for record in view.played)
    tips = (
        fitness(record) + (sign * error if error == error else 0.0)
        for record, error in errors
        for sign in (-1, 1)
    )
    scale = axes.linear(tips, include=[end.y for end in flat], least=traces.quiet(view))
    axes.set_axis(figure, "y", scale)
    last_agents = view.rounds[-1].agents if view.rounds else ()
    points = {int(agent.agent): (agent.round + 1.0, fitness(agent)) for agent in last_agents}
    ends = [*traces.ends_of(view, points), *flat]
    axes.name_ends(figure, ends, scale, axes.PLOT_HEIGHT)
    axes.round_axis(figure, len(view.rounds), free=0.1)
    return figure


def _add_flat_lines(figure: go.Figure, view: RunView) -> list[axes.End]:
    """Draw results on the test split as flat lines; return the end of each line, with its name."""
    if view.summary is None:
        return []
    flat = [("base model", "base model", view.summary["base"], "dot")]
    compared = view.comparison
    if compared is not None:
        baselines = {"guess": ("your guess", "dash"), "random": ("random guesses", "dashdot")}
        for arm in compared["arms"]:
            if arm["name"] in baselines:
                short, dash = baselines[arm["name"]]
                label = arms.arm_label(arm["name"], compared["agents"])
                flat.append((label, short, arm["test"], dash))
    last_round = max(1, len(view.rounds))
    ends: list[axes.End] = []
    for name, short, score, dash in flat:
        if score["mean"] is None:
            continue
        value = wording.with_error(score["mean"], score["se"], 3)
        line = axes.Line()
        for x in (0.6, last_round):
            line.add(x, score["mean"], f"{name}: {value} on {score['n']} test prompts")
        look = axes.Look(axes.GREY, dash=dash)
        axes.draw(figure, line, look, f"{name} (test)", "lines", legend=True)
        ends.append(axes.End(last_round, score["mean"], short))
    return ends


def plot_front(run: Run, objective: str) -> go.Figure:
    """Draw the fitness of all agents in all rounds against `objective`, and the Pareto front."""
    view = view_of(run)
    best, agent_looks = family.front(view.rounds), traces.looks(view)
    measures = [_measure(record, objective) for record in best]
    better = f" ({'smaller' if measures[0].minimize else 'larger'} is better)" if measures else ""
    figure = axes.new_figure(f"{objective}{better}", "fitness")

    def add(line: axes.Line, agent: AgentRecord, error: float = math.nan) -> None:
        goal = _measure(agent, objective)
        value = f"{objective} {wording.with_error(goal.mean, goal.se, 3)}"
        text = f"{traces.described(agent, view.mutable)}<br>{value}"
        line.add(goal.mean, fitness(agent), text, error)

    for agent in agent_looks:
        line = axes.Line()
        for record in view.played:
            if record.agent == agent and record.score is not None:
                add(line, record)
        traces.draw_agent(figure, view, agent, line, mode="markers", opacity=0.35)
    line = axes.Line()
    for record in best:
        add(line, record, fitness_se(record))
    marks = [agent_looks[record.agent] for record in best]
    marker = {"symbol": [m.symbol for m in marks], "color": [m.color for m in marks], "size": 11}
    errors = axes.error_bars(np.array([record.se for record in measures]), axes.GREY)
    axes.draw(
        figure, line, axes.Look(axes.GREY, dash="dot"), "front", line_width=1.5, legend=True,
        marker=marker, error_x=errors,
    )  # fmt: skip
    return figure


def _measure(agent: AgentRecord, objective: str) -> Objective:
    assert agent.score is not None, "agents of a front have a score"
    return next(goal for goal in agent.score.further if goal.name == objective)


def plot_schedules(run: Run, names: Sequence[str] | None = None) -> go.Figure:
    """Draw the hyperparameters of all agents over the rounds, one row for each hyperparameter.

    Agents that left are faint, and the winner's line is broad. Dotted lines lead from a parent to
    the agent that took its weights. An axis is logarithmic if its values span a factor of 10.

    Args:
        run: A run folder, a `Population`, or its rounds.
        names: Hyperparameters; None takes those that may mutate, or lr if none may.
    """
    view = view_of(run)
    chosen = list(names) if names is not None else drawn_names(view)
    rows = max(1, len(chosen))
    figure = axes.new_figure(
        height=80 + ROW * rows, rows=rows, cols=1, shared_xaxes=True,
        vertical_spacing=GAP / (ROW * rows),
    )  # fmt: skip
    parts, playing = traces.stretches(view), set(traces.survivors(view))
    for row, name in enumerate(chosen, start=1):
        value = heights(view, name)
        place: axes.Place = {"row": row, "col": 1}
        traces.add_winner(figure, view, value, legend=row == 1, place=place)
        for agent, agent_stretches in parts.items():
            strong = agent in playing
            line = traces.line_of(agent_stretches, value, partial(traces.brief, name=name))
            traces.draw_agent(
                figure, view, agent, line, place=place, opacity=1.0 if strong else 0.35,
                line_width=2.5 if strong else 1, marker_size=8 if strong else 5,
            )  # fmt: skip
        traces.add_copies(figure, view, value, place)
        figure.update_yaxes(title_text=short_name(name), **place)
        scale = axes.scale_of(map(value, view.played), names_of(view, name))
        axes.set_axis(figure, "y", scale, place)
        points = {agent: (agent_stretches[-1][-1].round + 1.0, value(agent_stretches[-1][-1]))
                  for agent, agent_stretches in parts.items()}  # fmt: skip
        axes.name_ends(figure, traces.ends_of(view, points), scale, ROW - GAP, place)
    axes.round_axis(figure, len(view.rounds), title="", free=0.1)
    figure.update_xaxes(title_text="round", row=rows, col=1)
    for agent in filter(traces.named(view).__contains__, parts if chosen else ()):
        # One entry of the legend for all rows.
        traces.draw_agent(
            figure, view, agent, axes.Line([math.nan], [math.nan]), legend=True, marker_size=6,
            place={"row": 1, "col": 1},
        )  # fmt: skip
    return figure


def plot_improvement(run: Run, name: str) -> go.Figure:
    """Draw each change of an agent's fitness against its value of the hyperparameter `name`.

    A change is measured from the agent's previous evaluation, or from the parent's if the agent has
    taken the parent's weights since. Rounds without an evaluation have no point.
    """
    view = view_of(run)
    figure = axes.new_figure(short_name(name), "change of fitness between evaluations", height=320)
    pairs: dict[int, list[tuple[AgentRecord, AgentRecord]]] = {
        agent: [pair for part in agent_stretches for pair in pairwise(filter(was_evaluated, part))]
        for agent, agent_stretches in traces.stretches(view).items()
    }
    for parent, agent in traces.copies(view):
        series = next(part for part in traces.stretches(view)[agent.agent] if part[0] is agent)
        after = next(filter(was_evaluated, series), None)
        if was_evaluated(parent) and after is not None:
            pairs[agent.agent].append((parent, after))
    values: list[float] = []
    gains: list[float] = []
    value_of = heights(view, name)
    for agent, series in pairs.items():
        line = axes.Line()
        for before, after in series:
            gain, value = fitness(after) - fitness(before), value_of(after)
            if math.isfinite(gain) and math.isfinite(value):
                line.add(value, gain, traces.brief(after, name))
                values.append(value)
                gains.append(gain)
        traces.draw_agent(
            figure, view, agent, line, mode="markers", legend=agent in traces.named(view),
            marker_size=9, marker_opacity=0.8, marker_maxdisplayed=4 * axes.MARKERS,
        )  # fmt: skip
    if values:
        axes.set_axis(figure, "x", axes.scale_of(values, names_of(view, name)))
        axes.set_axis(figure, "y", axes.linear(gains, include=[0.0], least=traces.quiet(view)))
    return figure


def drawn_names(view: RunView) -> list[str]:
    """Return the hyperparameters that figures show: those that may mutate, or lr if none may."""
    return list(view.mutable) or ["lr"]


def names_of(view: RunView, name: str) -> list[str]:
    """Return the names among the values of a hyperparameter, in order of occurrence."""
    values = (agent.hparams.get(name) for agent in view.played)
    return list(dict.fromkeys(value for value in values if isinstance(value, str)))


def heights(view: RunView, name: str) -> traces.Value:
    """Return a function that gives an agent's value of the hyperparameter `name` as a number.

    A name becomes its position in `names_of`, from 1.
    """
    places = {value: float(place) for place, value in enumerate(names_of(view, name), start=1)}

    def height(agent: AgentRecord) -> float:
        value = agent.hparams.get(name)
        if isinstance(value, str):
            return places[value]
        return math.nan if value is None else float(value)

    return height
