"""The front of a run with several goals, among the agents of all rounds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from evo_grpo.readers.report.figures.axes import GREY, Line, Look, draw, error_bars, new_figure
from evo_grpo.readers.report.figures.points import described, draw_agent, looks
from evo_grpo.record.columns import fitness, fitness_se
from evo_grpo.record.family import front
from evo_grpo.record.view import Run, view_of
from evo_grpo.record.wording import with_error

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from evo_grpo.record.records import AgentRecord
    from evo_grpo.types import Objective


def plot_front(run: Run, objective: str) -> go.Figure:
    """Draw fitness against a further objective: a point for every agent after every round.

    The agents of the front are drawn strong, with standard errors and a line through them.
    """
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
