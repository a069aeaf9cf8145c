"""Draws points and lines of agents; each agent has its look, and hover texts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from evo_grpo.readers.report.figures import axes
from evo_grpo.readers.report.page import text
from evo_grpo.record.columns import fitness, fitness_se
from evo_grpo.record.records import AgentRecord
from evo_grpo.record.view import RunView
from evo_grpo.record.wording import changes_text, combined, hyperparameter, with_error
from evo_grpo.schema.problems import short_name

if TYPE_CHECKING:
    import plotly.graph_objects as go

NAMED = 12
"""Greatest number of agents in a legend; hovering names the others."""
Value = Callable[[AgentRecord], float]
"""A function that returns the vertical coordinate of an agent in a round."""


def line_of(
    parts: Iterable[Iterable[AgentRecord]],
    value: Value,
    text: Callable[[AgentRecord], str] | None = None,
    error: Value | None = None,
) -> axes.Line:
    """Return a line through the records in `parts`, by round, with a gap between two parts.

    `value`, `text` and `error` return height, hover text and standard error of a record.
    """
    line = axes.Line()
    for part in parts:
        line.begin()
        for agent in part:
            line.add(
                agent.round + 1,
                value(agent),
                "" if text is None else text(agent),
                math.nan if error is None else error(agent),
            )
    return line


def draw_agent(figure: go.Figure, view: RunView, agent: int, line: axes.Line, **more: Any) -> None:
    """Draw a line in the look of an agent."""
    axes.draw(figure, line, looks(view)[agent], agent_name(agent), **more)


def add_winner(
    figure: go.Figure,
    view: RunView,
    value: Value,
    *,
    end: tuple[float, float] | None = None,
    legend: bool = True,
    text: Callable[[AgentRecord], str] | None = None,
    error: Value | None = None,
    **more: Any,
) -> None:
    """Draw the lines of the winner's ancestors as broad bands; each leads on to `end`, if set."""
    for number, path in enumerate(view.lines):
        line = line_of([path], value, text, error)
        if end is not None:
            line.add(*end)
        options: dict[str, Any] = {"line_width": 9, "opacity": 0.35, **more}
        axes.draw(
            figure, line, axes.Look(axes.GREY), axes.WINNER, "lines", legend=legend and not number,
            legendgroup="winner", **options,
        )  # fmt: skip


def quiet(view: RunView) -> float:
    """Return the least span of a fitness axis, eight times the run's median standard error."""
    errors = [error for agent in view.played if math.isfinite(error := fitness_se(agent))]
    return 8 * median(errors) if errors else 0.0


def looks(view: RunView) -> dict[int, axes.Look]:
    """Return, by agent, the look of each agent that ever played; it is the same in all figures."""
    agents = sorted({agent.agent for agent in view.played})
    return {agent: axes.look_of(index) for index, agent in enumerate(agents)}


def stretches(view: RunView) -> dict[int, list[list[AgentRecord]]]:
    """Return the records of each agent, in a new list whenever the agent takes other weights."""
    by_agent: dict[int, list[list[AgentRecord]]] = defaultdict(list)
    for record in view.rounds:
        for agent in record.agents:
            parts = by_agent[agent.agent]
            if not parts or not _continues(parts[-1][-1], agent):
                parts.append([])
            parts[-1].append(agent)
    return dict(sorted(by_agent.items()))


def _continues(before: AgentRecord, agent: AgentRecord) -> bool:
    same = agent.member == before.member or (
        agent.parent == before.member and not agent.mutation.restores
    )
    return same and before.round == agent.round - 1


def copies(view: RunView) -> Iterator[tuple[AgentRecord, AgentRecord]]:
    """Yield (parent, agent) for each agent that took the weights of another agent.

    `parent` is the other agent's record in the round before. Agents restored from the archive are
    left out, because the archive played no round.
    """
    latest: dict[int, AgentRecord] = {}
    for record in view.rounds:
        for agent in record.agents:
            if agent.parent is None or agent.member in latest:
                continue
            parent = latest.get(agent.parent)
            if parent is None or parent.round != agent.round - 1 or agent.mutation.restores:
                continue
            if parent.agent != agent.agent:
                yield parent, agent
        latest |= {agent.member: agent for agent in record.agents}


def add_copies(
    figure: go.Figure, view: RunView, value: Value, place: axes.Place = axes.ALONE
) -> None:
    """Draw a dotted line from each parent to the agent of the next round that took its weights."""
    by_agent: dict[int, list[tuple[AgentRecord, AgentRecord]]] = defaultdict(list)
    for parent, agent in copies(view):
        by_agent[agent.agent].append((parent, agent))
    for agent, pairs in sorted(by_agent.items()):
        name = agent_name(agent)
        axes.draw(
            figure, line_of(pairs, value), axes.Look(looks(view)[agent].color, dash="dot"),
            f"weights of {name}", "lines", legendgroup=name, line_width=1.5, place=place,
        )  # fmt: skip


def named(view: RunView) -> set[int]:
    """Return the agents in the legend: those that played the most rounds, at most `NAMED`."""
    rounds: dict[int, int] = defaultdict(int)
    for agent in view.played:
        rounds[agent.agent] += 1
    return set(sorted(rounds, key=lambda number: (-rounds[number], number))[:NAMED])


def survivors(view: RunView) -> list[int]:
    """Return the agents of the last round, best first."""
    last_agents = {agent.agent for agent in view.rounds[-1].agents} if view.rounds else set[int]()
    # An agent of the front may have more than one row.
    return list(dict.fromkeys(r["agent"] for r in view.leaderboard if r["agent"] in last_agents))


def ends_of(view: RunView, points: Mapping[int, tuple[float, float]]) -> list[axes.End]:
    """Return the ends, at `points`, of the lines of the last round's agents, best agent first."""
    agent_looks = looks(view)
    return [
        axes.End(*points[agent], agent_looks[agent].named(agent_name(agent)), agent)
        for agent in survivors(view)
        if agent in points
    ]


def agent_name(agent: int) -> str:
    """Return the name of an agent in figures."""
    return f"agent {agent}"


def described(agent: AgentRecord, names: Sequence[str]) -> str:
    """Describe an agent in one round as lines of HTML; `names` are hyperparameters to include."""
    lines = [
        f"<b>agent {agent.agent}</b>, member {agent.member}, round {agent.round + 1}",
        f"{measure(agent)} {with_error(fitness(agent), fitness_se(agent), 3)}",
        *(f"{short_name(name)} {hyperparameter(agent.hparams, name)}" for name in combined(names)),
        made(agent),
    ]
    if agent.state != "ok":
        lines.append(f"failed: {text(agent.reason)}")
    return "<br>".join(lines)


def measure(agent: AgentRecord) -> str:
    """Return what an agent's score in a round is: fitness, or mean reward of training."""
    trained = agent.score is not None and agent.score.steps
    return "mean reward of training" if trained else "fitness"


def brief(agent: AgentRecord, name: str) -> str:
    """Describe an agent in one round in a line of text, with its hyperparameter `name`."""
    value = hyperparameter(agent.hparams, combined([name])[0])
    return f"agent {agent.agent}, member {agent.member}, round {agent.round + 1}: {value}"


def made(agent: AgentRecord) -> str:
    """Return the origin of a member, such as its mutation, as one line of HTML."""
    mutation = agent.mutation
    if agent.parent is None:
        return "of the first population"
    changes = f": {text(changes_text(mutation.changes))}" if mutation.changes else ""
    return f"{text(mutation.op)} of member {agent.parent}{changes}"
