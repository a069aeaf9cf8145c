"""Agents as points of a figure, a look for each, with the text that hovering shows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evo_grpo.readers.report.figures.ends import End
from evo_grpo.readers.report.figures.style import Look, look_of
from evo_grpo.readers.report.page.build import text
from evo_grpo.record.columns import fitness, fitness_se
from evo_grpo.record.records import AgentRecord
from evo_grpo.record.view import RunView
from evo_grpo.record.wording import changes_text, hyperparameter, with_error
from evo_grpo.schema.shown import short_name

if TYPE_CHECKING:
    import plotly.graph_objects as go

NAMED = 12
"""Agents in a legend; hovering names the others."""


class Line:
    """Points of one agent in order; NaN separates two stretches."""

    def __init__(self) -> None:
        self._x: list[float] = []
        self._y: list[float] = []
        self._errors: list[float] = []
        self.texts: list[str] = []

    def add(self, x: float, y: float, text: str = "", error: float = math.nan) -> None:
        """Add a point with a text to hover over, and its standard error; NaN is none."""
        self._x.append(x)
        self._y.append(y)
        self._errors.append(error)
        self.texts.append(text)

    def part(self) -> None:
        """End a stretch."""
        if self._x and not math.isnan(self._x[-1]):
            self.add(math.nan, math.nan)

    @property
    def x(self) -> np.ndarray:
        """(points,) float64."""
        return np.array(self._x, dtype=np.float64)

    @property
    def y(self) -> np.ndarray:
        """(points,) float64."""
        return np.array(self._y, dtype=np.float64)

    def error_bars(self, color: str) -> dict[str, Any] | None:
        """Return the standard errors as plotly draws them, None where no point has one."""
        errors = np.array(self._errors, dtype=np.float64)
        if not np.isfinite(errors).any():
            return None
        return {"array": errors, "color": color, "thickness": 1, "width": 3}


def looks(view: RunView) -> dict[int, Look]:
    """Return the look of each agent that ever played, equal in all figures of a run."""
    agents = sorted({agent.agent for agent in view.played})
    return {agent: look_of(index) for index, agent in enumerate(agents)}


def stretches(view: RunView) -> dict[int, list[list[AgentRecord]]]:
    """Return the records of each agent, a list for each stretch of rounds.

    A stretch ends where the agent leaves, or takes the weights of another one.
    """
    found: dict[int, list[list[AgentRecord]]] = defaultdict(list)
    for record in view.rounds:
        for agent in record.agents:
            own = found[agent.agent]
            if not own or not _continues(own[-1][-1], agent):
                own.append([])
            own[-1].append(agent)
    return dict(sorted(found.items()))


def _continues(before: AgentRecord, agent: AgentRecord) -> bool:
    same = agent.member == before.member or (
        agent.parent == before.member and not agent.mutation.restores
    )
    return same and before.round == agent.round - 1


def copies(view: RunView) -> Iterator[tuple[AgentRecord, AgentRecord]]:
    """Yield each agent that took the weights of another one, behind that one a round before.

    A restored agent is not among them: its parent, the archive, played no round.
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
    figure: go.Figure,
    view: RunView,
    value: Callable[[AgentRecord], float],
    *,
    row: int | None = None,
    col: int | None = None,
) -> None:
    """Draw a dotted line from each parent to the agent of the next round that took its weights.

    Args:
        figure: The figure.
        view: The run.
        value: The height of an agent's point.
        row: The row in a figure that has several.
        col: The column in it.
    """
    found: dict[int, Line] = defaultdict(Line)
    for parent, agent in copies(view):
        line = found[agent.agent]
        line.add(parent.round + 1, value(parent))
        line.add(agent.round + 1, value(agent))
        line.part()
    seen = looks(view)
    for agent, line in sorted(found.items()):
        figure.add_scatter(
            x=line.x, y=line.y, mode="lines", hoverinfo="skip", showlegend=False,
            name=f"weights of {agent_name(agent)}", legendgroup=agent_name(agent),
            line={"color": seen[agent].color, "dash": "dot", "width": 1.5},
            row=row, col=col,
        )  # fmt: skip


def named(view: RunView) -> set[int]:
    """Return the agents that a legend names: those that played the most rounds."""
    rounds: dict[int, int] = defaultdict(int)
    for agent in view.played:
        rounds[agent.agent] += 1
    return set(sorted(rounds, key=lambda one: (-rounds[one], one))[:NAMED])


def survivors(view: RunView) -> list[int]:
    """Return the agents of the last round, the best first."""
    last = {agent.agent for agent in view.rounds[-1].agents} if view.rounds else set[int]()
    # An agent of the front may have more than one row.
    return list(dict.fromkeys(r["agent"] for r in view.leaderboard if r["agent"] in last))


def ends_of(view: RunView, points: Mapping[int, tuple[float, float]]) -> list[End]:
    """Return the ends of the lines of the agents of the last round, the best first.

    `points` has the last point of each agent.
    """
    seen = looks(view)
    return [
        End(*points[agent], seen[agent].named(agent_name(agent)), agent)
        for agent in survivors(view)
        if agent in points
    ]


def agent_name(agent: int) -> str:
    """Return the name of an agent in legends and at the ends of lines."""
    return f"agent {agent}"


def described(agent: AgentRecord, names: Sequence[str]) -> str:
    """Return an agent in one round with the named hyperparameters, as lines of HTML."""
    lines = [
        f"<b>agent {agent.agent}</b>, member {agent.member}, round {agent.round + 1}",
        f"{measure(agent)} {with_error(fitness(agent), fitness_se(agent), 3)}",
        *(f"{short_name(name)} {hyperparameter(agent.hparams, name)}" for name in shown(names)),
        made(agent),
    ]
    if agent.state != "ok":
        lines.append(f"failed: {text(agent.reason)}")
    return "<br>".join(lines)


def measure(agent: AgentRecord) -> str:
    """Return what the fitness of an agent in a round is: fitness, or the reward of training."""
    trained = agent.score is not None and agent.score.steps
    return "mean reward of training" if trained else "fitness"


def brief(agent: AgentRecord, name: str) -> str:
    """Return an agent in one round with one of its values, in one line."""
    value = hyperparameter(agent.hparams, shown([name])[0])
    return f"agent {agent.agent}, member {agent.member}, round {agent.round + 1}: {value}"


def made(agent: AgentRecord) -> str:
    """Return the origin of a member, in one line of HTML."""
    mutation = agent.mutation
    if agent.parent is None:
        return "of the first population"
    changes = f": {text(changes_text(mutation.changes))}" if mutation.changes else ""
    return f"{text(mutation.op)} of member {agent.parent}{changes}"


def shown(names: Sequence[str]) -> list[str]:
    """Return hyperparameters with clip_coef in place of its two ends."""
    return list(dict.fromkeys("clip_coef" if n.startswith("clip_") else n for n in names))
