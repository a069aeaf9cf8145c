"""The front of a run with several goals, among the agents of all rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evo_grpo.readers.report.figures.points import Line, agent_name, described, looks
from evo_grpo.readers.report.figures.style import GREY, new_figure
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

    Args:
        run: A run folder, a `Population`, or its rounds.
        objective: Name of the objective.

    Raises:
        EngineUnavailable: plotly is not installed.
        EvoGrpoError: The folder cannot be read.
    """
    view = view_of(run)
    best, seen = front(view.rounds), looks(view)
    found = next((_measure(one, objective) for one in best), None)
    better = "" if found is None else f" ({'smaller' if found.minimize else 'larger'} is better)"
    figure = new_figure(f"{objective}{better}", "fitness")
    for agent, look in seen.items():
        line = Line()
        for one in view.played:
            if one.agent == agent and one.score is not None:
                _add(line, one, objective, view.mutable)
        name = agent_name(agent)
        figure.add_scatter(
            x=line.x, y=line.y, text=line.texts, hoverinfo="text", mode="markers",
            name=name, legendgroup=name, showlegend=False, opacity=0.35,
            marker={"symbol": look.symbol, "color": look.color, "size": 7},
        )  # fmt: skip
    line = Line()
    for one in best:
        _add(line, one, objective, view.mutable, error=fitness_se(one))
    measures = [_measure(one, objective) for one in best]
    figure.add_scatter(
        x=line.x, y=line.y, text=line.texts, hoverinfo="text", mode="lines+markers", name="front",
        line={"color": GREY, "dash": "dot", "width": 1.5},
        marker={
            "symbol": [seen[one.agent].symbol for one in best],
            "color": [seen[one.agent].color for one in best],
            "size": 11,
        },
        error_x={"array": [one.se for one in measures], "color": GREY, "thickness": 1, "width": 3},
        error_y=line.error_bars(GREY),
    )  # fmt: skip
    return figure


def _add(
    line: Line, agent: AgentRecord, objective: str, names: tuple[str, ...], error: float = 0.0
) -> None:
    found = _measure(agent, objective)
    text = f"{described(agent, names)}<br>{objective} {with_error(found.mean, found.se, 3)}"
    line.add(found.mean, fitness(agent), text, error)


def _measure(agent: AgentRecord, objective: str) -> Objective:
    assert agent.score is not None, "agents of a front have a score"
    return next(one for one in agent.score.further if one.name == objective)
