"""The family tree of a run as a plotly figure: fitness over rounds, parents joined to children."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from evo_grpo.record import columns
from evo_grpo.record.family import ancestry, best_ever

if TYPE_CHECKING:
    from evo_grpo.record.records import AgentRecord, RoundRecord

Point = tuple[float, float]


def lineage_figure(rounds: Sequence[RoundRecord]) -> Any:  # noqa: ANN401 -- a plotly Figure
    """Return the family tree.

    Args:
        rounds: The finished rounds, first to last.

    Returns:
        A `plotly.graph_objects.Figure`: each agent of each round is a point at its fitness, a line
        leads to it from what it goes on from, dashed where it is a copy, and the line that led to
        the best agent ever is thick.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    own, copied = _edges(rounds)
    figure.add_scatter(**_lines("same member", own, "#7f8c8d"))
    figure.add_scatter(**_lines("copy", copied, "#c0392b", dash="dot"))
    best = best_ever(rounds)
    if best is not None:
        line = ancestry(rounds[: best.round + 1], best.member)
        figure.add_scatter(
            x=[agent.round + 1 for agent in line],
            y=[columns.fitness(agent) for agent in line],
            mode="lines",
            line={"width": 4, "color": "#2980b9"},
            name=f"line of agent {best.agent}, the best",
            hoverinfo="skip",
        )
    played = [agent for record in rounds for agent in record.agents]
    figure.add_scatter(
        x=[agent.round + 1 for agent in played],
        y=[columns.fitness(agent) for agent in played],
        mode="markers",
        marker={"size": 9, "color": "#2c3e50"},
        text=[_about(agent) for agent in played],
        hovertemplate="%{text}<extra></extra>",
        name="agent in a round",
    )
    figure.update_layout(
        title="Family tree",
        xaxis={"title": "round", "dtick": 1},
        yaxis={"title": "fitness"},
        template="plotly_white",
    )
    return figure


def _edges(
    rounds: Sequence[RoundRecord],
) -> tuple[list[tuple[Point, Point]], list[tuple[Point, Point]]]:
    """Return the edges of members that go on, and those from a parent to its copy."""
    own: list[tuple[Point, Point]] = []
    copied: list[tuple[Point, Point]] = []
    latest: dict[int, AgentRecord] = {}
    for record in rounds:
        for agent in record.agents:
            before, edges = latest.get(agent.member), own
            if before is None and agent.parent is not None:
                before, edges = latest.get(agent.parent), copied
            if before is not None:
                edges.append((_point(before), _point(agent)))
        latest |= {agent.member: agent for agent in record.agents}
    return own, copied


def _point(agent: AgentRecord) -> Point:
    return agent.round + 1, columns.fitness(agent)


def _lines(
    name: str, edges: Sequence[tuple[Point, Point]], color: str, dash: str = "solid"
) -> dict[str, Any]:
    points = list(_broken(edges))
    return {
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "mode": "lines",
        "line": {"width": 1, "color": color, "dash": dash},
        "name": name,
        "hoverinfo": "skip",
    }


def _broken(edges: Sequence[tuple[Point, Point]]) -> Iterator[tuple[float | None, float | None]]:
    for start, end in edges:
        yield from (start, end, (None, None))


def _about(agent: AgentRecord) -> str:
    lines = [f"agent {agent.agent}, member {agent.member}, round {agent.round + 1}"]
    if agent.parent is not None:
        lines.append(f"from member {agent.parent}: {agent.mutation.op}")
    lines += [f"{name} {old:g} → {new:g}" for name, (old, new) in agent.mutation.changes.items()]
    lines.append(f"fitness {columns.fitness(agent):.4f}")
    return "<br>".join(lines)
