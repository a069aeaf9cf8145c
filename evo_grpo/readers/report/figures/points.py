"""Agents as points of a figure, grouped by lineage, with the text that hovering shows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evo_grpo.readers.report.page.build import text
from evo_grpo.record.columns import fitness, fitness_se
from evo_grpo.record.records import AgentRecord
from evo_grpo.record.view import RunView
from evo_grpo.record.wording import changes_text, hyperparameter, with_error
from evo_grpo.schema.shown import short_name

NAMED = 12
"""Lineages in a legend; hovering names the others."""


class Line:
    """Points of one lineage in order; NaN separates two stretches."""

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


def stretches(view: RunView) -> dict[int, list[list[AgentRecord]]]:
    """Return the records of each lineage by its founder, a list for each stretch of rounds.

    A stretch ends where an agent leaves, or takes the weights of another lineage.
    """
    founders = view.founders
    found: dict[int, list[list[AgentRecord]]] = defaultdict(list)
    latest: dict[int, tuple[int, list[AgentRecord]]] = {}
    for record in view.rounds:
        for agent in record.agents:
            founder = founders[agent.member]
            before = latest.get(agent.agent)
            if before is None or before[0] != founder or before[1][-1].round != record.round - 1:
                before = (founder, [])
                found[founder].append(before[1])
                latest[agent.agent] = before
            before[1].append(agent)
    return dict(sorted(found.items()))


def named(parts: Mapping[int, Sequence[Sequence[AgentRecord]]]) -> set[int]:
    """Return the founders that a legend names: those whose lineages have the most rounds."""
    rounds = {founder: sum(map(len, own)) for founder, own in parts.items()}
    return set(sorted(rounds, key=lambda one: (-rounds[one], one))[:NAMED])


def lineage_name(view: RunView, founder: int) -> str:
    """Return the name of a lineage in a legend: the agent of the first round."""
    for record in view.rounds:
        for agent in record.agents:
            if agent.member == founder:
                return f"from agent {agent.agent}"
    return f"from member {founder}"


def described(agent: AgentRecord, names: Sequence[str]) -> str:
    """Return an agent in one round with the named hyperparameters, as lines of HTML."""
    lines = [
        f"<b>agent {agent.agent}</b>, member {agent.member}, round {agent.round + 1}",
        f"fitness {with_error(fitness(agent), fitness_se(agent), 3)}",
        *(f"{short_name(name)} {hyperparameter(agent.hparams, name)}" for name in shown(names)),
        made(agent),
    ]
    if agent.state != "ok":
        lines.append(f"failed: {text(agent.reason)}")
    return "<br>".join(lines)


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
