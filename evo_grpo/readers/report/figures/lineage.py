"""Draws a run's family tree: members as nodes, mutations on edges, a broad line to the winner."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from evo_grpo.readers.report.figures import axes, traces
from evo_grpo.readers.report.page import text
from evo_grpo.readers.terminal.result import winner_label
from evo_grpo.record.columns import was_evaluated
from evo_grpo.record.records import AgentRecord
from evo_grpo.record.view import Run, RunView, view_of
from evo_grpo.record.wording import changes_text, number

if TYPE_CHECKING:
    import plotly.graph_objects as go

WRITTEN_OUT = 40
"""Greatest number of mutations at which edges have labels; hovering always shows mutations."""
CROWD = 400
"""Number of members above which edges are drawn thin and faint."""
LANE = 34
"""Pixels of height for each agent."""
WIDTH, NODE = 1000, 12
"""Assumed pixels of a figure's width and of a node, to place labels."""
LETTER, LINE = 6, 13
"""Pixels of a letter's width and of a line's height in a label."""

_Box = tuple[float, float, float, float]
"""A box in a figure, in pixels: x and y of its middle, width and height."""
_Life = list[AgentRecord]
"""The records of one member, one per round, first to last."""


def plot_lineage(run: Run) -> go.Figure:
    """Draw the family tree of a run, with a row for each agent and a node where a member begins.

    An edge leads from a parent, in the parent's last round before the child begins, to the child.
    The label of an edge is the mutation. A broad line leads along the winner's ancestors.

    Args:
        run: A run folder, a `Population`, or its rounds.
    """
    view = view_of(run)
    slots = sorted({agent.agent for record in view.rounds for agent in record.agents})
    figure = axes.new_figure("round", "agent", height=max(260, 110 + LANE * len(slots)))
    lives = _lives(view)
    by_agent: dict[int, list[_Life]] = defaultdict(list)
    for life in lives.values():
        by_agent[life[0].agent].append(life)
    mean_won = view.winner is not None and view.winner.agent is None
    end = _winner_end(view) if mean_won else None
    traces.add_winner(figure, view, lambda agent: agent.agent, end=end, line_width=12, opacity=0.4)
    for agent in slots:
        _add_agent(figure, view, lives, by_agent[agent])
    _add_star(figure, view)
    rounds = max(1, len(view.rounds) + mean_won)
    _add_mutations(figure, lives, rounds)
    axes.round_axis(figure, rounds)
    if mean_won:  # a mean of agents of the last round played no round
        ticks = range(1, rounds, axes.tick_distance(rounds))
        names = [*map(str, ticks), "mean"]
        figure.update_xaxes(tickmode="array", tickvals=[*ticks, rounds], ticktext=names)
    figure.update_yaxes(
        tickvals=slots,
        ticktext=[str(slot) for slot in slots],
        autorange="reversed",
        showgrid=False,
        zeroline=False,
    )
    return figure


def _lives(view: RunView) -> dict[int, _Life]:
    lives: dict[int, _Life] = defaultdict(list)
    for record in view.rounds:
        for agent in record.agents:
            lives[agent.member].append(agent)
    return lives


def _edge(lives: dict[int, _Life], child: AgentRecord) -> tuple[AgentRecord, AgentRecord] | None:
    """Return the records at both ends of the edge to `child`; None if the parent has no record."""
    parent = None if child.parent is None else lives.get(child.parent)
    if parent is None:
        return None
    earlier = [record for record in parent if record.round < child.round]
    return (earlier[-1] if earlier else parent[0], child)


def _add_agent(
    figure: go.Figure, view: RunView, lives: dict[int, _Life], agent_lives: list[_Life]
) -> None:
    """Draw the members of one agent as nodes, and the edges that lead to these nodes."""
    agent = agent_lives[0][0].agent
    crowded = len(lives) > CROWD
    lines, nodes = axes.Line(), axes.Line()
    for life in agent_lives:
        for ends in (_edge(lives, life[0]), (life[0], life[-1])):
            lines.begin()
            for end in ends or ():
                lines.add(end.round + 1, end.agent)
        nodes.add(life[0].round + 1, life[0].agent, _text(view, life))
    width, opacity = (1, 0.3) if crowded else (2, 1.0)
    traces.draw_agent(figure, view, agent, lines, mode="lines", line_width=width, opacity=opacity)
    traces.draw_agent(
        figure, view, agent, nodes, mode="markers", legend=agent in traces.named(view),
        marker_size=11, marker_line={"color": "white", "width": 1},
    )  # fmt: skip


def _text(view: RunView, life: _Life) -> str:
    """Return the hover text of a member: its name, fitness, hyperparameters and mutation."""
    records = [record for record in life if record.score is None or was_evaluated(record)] or life
    means = [number(record.score.mean) if record.score else "failed" for record in records]
    if len(means) > 8:
        means = [*means[:4], "…", *means[-3:]]
    until = f" to {life[-1].round + 1}" if life[-1] is not life[0] else ""
    head, *lines = traces.described(life[0], view.mutable).split("<br>")
    founder = view.founders[life[0].member]
    first = next((agent.agent for agent in view.rounds[0].agents if agent.member == founder), None)
    if life[0].parent is not None and first is not None:
        lines.append(f"descends from agent {first} of the first round")
    measured = f"{traces.measure(records[0])} {' → '.join(means)}"
    return "<br>".join([f"{head}{until}", measured, *lines[1:]])


def _winner_end(view: RunView) -> tuple[float, float]:
    """Return (round, agent) at the end of the winner's line; for a mean, after the last round."""
    ends = [path[-1] for path in view.lines]
    mean_won = view.winner is not None and view.winner.agent is None
    x = len(view.rounds) + 1 if mean_won else ends[0].round + 1
    return x, sum(end.agent for end in ends) / len(ends)


def _add_star(figure: go.Figure, view: RunView) -> None:
    if (winner := view.winner) is None:
        return
    star = axes.Line()
    hover_text = text(f"{winner.name}, member {winner.member}: {winner_label(view)}")
    star.add(*_winner_end(view), hover_text)
    options: dict[str, Any] = {"legendgroup": "winner", "marker_size": 16, "marker_maxdisplayed": 0}
    axes.draw(figure, star, axes.Look(axes.GREY, "star"), axes.WINNER, "markers", **options)


def _add_mutations(figure: go.Figure, lives: dict[int, _Life], rounds: int) -> None:
    """Mark each mutation on the edge to the mutated member, with a label where there is room."""
    mutated = [life[0] for life in lives.values() if life[0].mutation.changes]
    edges = [edge for child in mutated if (edge := _edge(lives, child))]
    if not edges:
        return
    scale = (WIDTH / rounds, LANE)
    nodes = [(life[0].round + 1, life[0].agent, NODE, NODE) for life in lives.values()]
    boxes: list[_Box] = [(x * scale[0], y * scale[1], w, h) for x, y, w, h in nodes]
    places: list[tuple[float, float]] = []
    for parent, child in edges:
        lines = [text(part) for part in changes_text(child.mutation.changes, "→").split(", ")]
        size = (LETTER * max(map(len, lines)) + 4, LINE * len(lines))
        crowded = len(edges) > WRITTEN_OUT
        free = None if crowded else _free_place(parent, child, size, scale, boxes)
        x, y = free or _along(parent, child, 0.5)
        places.append((x, y))
        if free:
            boxes.append((x * scale[0], y * scale[1], *size))
            figure.add_annotation(
                x=x, y=y, text="<br>".join(lines), showarrow=False, font={"size": 10},
                bgcolor="rgba(255,255,255,0.9)", borderpad=1,
                name=f"{traces.agent_name(child.agent)} mutation",
            )  # fmt: skip
    marks = axes.Line()
    for place, (_, child) in zip(places, edges, strict=True):
        marks.add(*place, f"agent {child.agent}, round {child.round + 1}: {traces.made(child)}")
    look = axes.Look(axes.GREY, "diamond-open")
    axes.draw(figure, marks, look, "mutation", "markers", legend=True)


def _free_place(
    parent: AgentRecord,
    child: AgentRecord,
    size: tuple[float, float],
    scale: tuple[float, float],
    taken: list[_Box],
) -> tuple[float, float] | None:
    """Return the best point (round, agent) on an edge for a label; None if no point has room.

    `size` has the label's width and height in pixels, `scale` the pixels of a round and of an
    agent. `taken` has the boxes of nodes and of labels that are placed already.
    """
    for share in (0.5, 0.4, 0.6, 0.3, 0.7):
        x, y = _along(parent, child, share)
        middle = (x * scale[0], y * scale[1])
        if not any(
            abs(middle[0] - other[0]) < (size[0] + other[2]) / 2
            and abs(middle[1] - other[1]) < (size[1] + other[3]) / 2
            for other in taken
        ):
            return x, y
    return None


def _along(parent: AgentRecord, child: AgentRecord, share: float) -> tuple[float, float]:
    """Return the point (round, agent) on an edge at a share of its length from the parent."""
    x = parent.round + 1 + share * (child.round - parent.round)
    return x, parent.agent + share * (child.agent - parent.agent)
