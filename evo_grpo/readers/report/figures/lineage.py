"""The family tree: members as nodes, mutations on the edges, the winner's line above them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from evo_grpo.readers.report.figures.points import (
    Line,
    described,
    lineage_name,
    made,
    named,
)
from evo_grpo.readers.report.figures.style import (
    GREY,
    MARKERS,
    WINNER,
    Look,
    look_of,
    new_figure,
    round_axis,
)
from evo_grpo.readers.report.page.build import text
from evo_grpo.readers.terminal.result import winner_label
from evo_grpo.record.records import AgentRecord
from evo_grpo.record.view import Run, RunView, view_of
from evo_grpo.record.wording import changes_text, number

if TYPE_CHECKING:
    import plotly.graph_objects as go

WRITTEN_OUT = 40
"""Mutations up to which each is written at its edge; with more, hovering shows them."""
CROWD = 400
"""Members from which on edges are drawn thin and faint."""
LANE = 30
"""Pixels of height for each agent."""


_Life = list[AgentRecord]
"""The rounds of one member, first to last."""


def plot_lineage(run: Run) -> go.Figure:
    """Draw the family tree of a run: a row for each agent, a node where a member begins.

    An edge leads from a parent, in its last round before, to the member that took its weights or
    its place; the mutation stands at it. The winner's line of ancestors is drawn broad.

    Args:
        run: A run folder, a `Population`, or its rounds.

    Raises:
        EngineUnavailable: plotly is not installed.
        EvoGrpoError: The folder cannot be read.
    """
    view = view_of(run)
    slots = sorted({agent.agent for record in view.rounds for agent in record.agents})
    figure = new_figure("round", "agent", height=max(260, 110 + LANE * len(slots)))
    lives = _lives(view)
    founders = view.founders
    by_founder: dict[int, list[_Life]] = defaultdict(list)
    for life in lives.values():
        by_founder[founders[life[0].member]].append(life)
    in_legend = named(by_founder)
    looks = {founder: look_of(index) for index, founder in enumerate(sorted(by_founder))}
    for founder, look in looks.items():
        legend = founder in in_legend
        _add_lineage(figure, view, lives, look, by_founder[founder], legend=legend)
    _add_winner(figure, view, looks)
    _add_mutations(figure, lives)
    round_axis(figure, max(len(view.rounds), *(one.born + 1 for one in view.family), 1))
    figure.update_yaxes(
        tickvals=slots,
        ticktext=[str(slot) for slot in slots],
        autorange="reversed",
        showgrid=False,
        zeroline=False,
    )
    return figure


def _lives(view: RunView) -> dict[int, _Life]:
    found: dict[int, _Life] = defaultdict(list)
    for record in view.rounds:
        for agent in record.agents:
            found[agent.member].append(agent)
    return found


def _edge(lives: dict[int, _Life], child: AgentRecord) -> tuple[AgentRecord, AgentRecord] | None:
    """Return parent and child at the two ends of an edge; None where the parent played no round."""
    parent = None if child.parent is None else lives.get(child.parent)
    if parent is None:
        return None
    before = [one for one in parent if one.round < child.round]
    return (before[-1] if before else parent[0], child)


def _add_lineage(
    figure: go.Figure,
    view: RunView,
    lives: dict[int, _Life],
    look: Look,
    own: list[_Life],
    *,
    legend: bool,
) -> None:
    """Draw the members of one lineage with the edges that lead to them."""
    name = lineage_name(view, view.founders[own[0][0].member])
    crowded = len(lives) > CROWD
    lines, nodes = Line(), Line()
    for life in own:
        if edge := _edge(lives, life[0]):
            for end in edge:
                lines.add(end.round + 1, end.agent)
            lines.part()
        lines.add(life[0].round + 1, life[0].agent)
        lines.add(life[-1].round + 1, life[-1].agent)
        lines.part()
        nodes.add(life[0].round + 1, life[0].agent, _text(view, life))
    common = {"legendgroup": name, "name": name}
    figure.add_scatter(
        x=lines.x, y=lines.y, mode="lines", hoverinfo="skip", showlegend=False, **common,
        line={"color": look.color, "dash": look.dash, "width": 1 if crowded else 2},
        opacity=0.3 if crowded else 1.0,
    )  # fmt: skip
    figure.add_scatter(
        x=nodes.x, y=nodes.y, mode="markers", text=nodes.texts, hoverinfo="text", **common,
        showlegend=legend,
        marker={"color": look.color, "symbol": look.symbol, "maxdisplayed": MARKERS, "size": 11,
                "line": {"color": "white", "width": 1}},
    )  # fmt: skip


def _text(view: RunView, life: _Life) -> str:
    """Return the text of a member's node: its name, fitness, hyperparameters and mutation."""
    means = [number(one.score.mean) if one.score else "failed" for one in life]
    if len(means) > 8:
        means = [*means[:4], "…", *means[-3:]]
    until = f" to {life[-1].round + 1}" if life[-1] is not life[0] else ""
    head, *rest = described(life[0], view.mutable).split("<br>")
    return "<br>".join([f"{head}{until}", f"fitness {' → '.join(means)}", *rest[1:]])


def _add_winner(
    figure: go.Figure,
    view: RunView,
    looks: Mapping[int, Look],
) -> None:
    """Draw the winner as a star, and its lines of ancestors broad in their own colours.

    The star of a mean is one round behind the last, between its parents.
    """
    winner = view.winner
    if winner is None:
        return
    ends = [path[-1] for path in view.lines]
    y = sum(end.agent for end in ends) / len(ends)
    x = len(view.rounds) + 1 if winner.agent is None else ends[0].round + 1
    for count, path in enumerate(view.lines):
        line = Line()
        for agent in path:
            line.add(agent.round + 1, agent.agent)
        if winner.agent is None:
            line.add(x, y)
        color = looks[view.founders[path[-1].member]].color
        for width, shade, opacity in ((12, GREY, 0.4), (4, color, 1.0)):
            figure.add_scatter(
                x=line.x, y=line.y, mode="lines", hoverinfo="skip", name=WINNER,
                legendgroup="winner", showlegend=count == 0 and shade == GREY,
                line={"color": shade, "width": width}, opacity=opacity,
            )  # fmt: skip
    figure.add_scatter(
        x=[x], y=[y], mode="markers", name=WINNER, legendgroup="winner", showlegend=False,
        text=[text(f"{winner.name}, member {winner.member}: {winner_label(view)}")],
        hoverinfo="text", marker={"symbol": "star", "size": 16, "color": GREY},
    )  # fmt: skip


def _mutations(lives: dict[int, _Life]) -> Iterator[tuple[float, float, str, str]]:
    """Yield the place of each mutation, with a short and a full text."""
    for life in lives.values():
        edge = _edge(lives, life[0])
        if edge is None or not life[0].mutation.changes:
            continue
        parent, child = edge
        x = (parent.round + child.round) / 2 + 1
        y = (parent.agent + child.agent) / 2
        short = changes_text(life[0].mutation.changes, "→")
        yield x, y, text(short), f"agent {child.agent}, round {child.round + 1}: {made(child)}"


def _add_mutations(figure: go.Figure, lives: dict[int, _Life]) -> None:
    found = list(_mutations(lives))
    if not found:
        return
    written = len(found) <= WRITTEN_OUT
    figure.add_scatter(
        x=[x for x, *_ in found], y=[y for _, y, *_ in found],
        mode="markers+text" if written else "markers",
        text=[short for _, _, short, _ in found] if written else None,
        textposition="top center", textfont={"size": 10},
        hovertext=[full for *_, full in found], hoverinfo="text", name="mutation",
        marker={"symbol": "diamond-open", "maxdisplayed": MARKERS, "size": 7, "color": GREY},
    )  # fmt: skip
