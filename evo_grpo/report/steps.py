"""What training measured, as curves over its steps; by rounds where no steps were kept."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from evo_grpo.record.step_metrics import metric_rows

if TYPE_CHECKING:
    from evo_grpo.report.contents import RunContents

FIRST = (
    "reward",
    "loss",
    "kl",
    "zero_variance",
    "clip_fraction",
    "entropy",
    "completion_length",
    "ended",
    "sampler_gap",
    "grad_norm",
    "ratio_max",
)
"""Metrics in the order in which they are drawn; the rewards of single functions follow `reward`."""
_PREFIX = "reward/"


@dataclass
class Curve:
    """One metric of one agent, as long as its weights are of one lineage.

    Attributes:
        founder: The member of the first population that it descends from.
        steps: GRPO steps since the start of the run, counted from 1.
        values: The metric, NaN where a step has none.
    """

    founder: int
    steps: list[int] = field(default_factory=list[int])
    values: list[float] = field(default_factory=list[float])


Curves = dict[str, list[Curve]]
"""Curves by the names of their metrics."""


def curves(contents: RunContents) -> Curves:
    """Return the metrics of a run by name, a curve for each agent and lineage."""
    rows = [] if contents.folder is None else metric_rows(contents.folder)
    founders = contents.founders()
    whose = {(r.round, int(a.agent)): founders[a.member] for r in contents.rounds for a in r.agents}
    found: dict[str, dict[tuple[int, int], Curve]] = defaultdict(dict)
    points = _of_steps(rows, contents.steps_per_round) if rows else _of_rounds(contents)
    for round, agent, step, name, value in points:
        founder = whose.get((round, agent))
        if founder is not None:  # else of a round that is not recorded yet
            curve = found[name].setdefault((agent, founder), Curve(founder))
            curve.steps.append(step)
            curve.values.append(math.nan if value is None else float(value))
    return {name: list(own.values()) for name, own in found.items()}


def metric_names(measured: Curves) -> list[str]:
    """Return the metrics that are worth a figure, in order: those with values that differ."""
    worth = [name for name, own in measured.items() if _differ(own)]
    functions = sorted(name for name in worth if name.startswith(_PREFIX))
    ordered = [name for name in FIRST if name in worth]
    return [*ordered[:1], *functions, *ordered[1:]]


def _differ(own: Iterable[Curve]) -> bool:
    known = (value for curve in own for value in curve.values if math.isfinite(value))
    first = next(known, None)
    return any(value != first for value in known)


def _drawn(name: str) -> bool:
    return name in FIRST or name.startswith(_PREFIX)


_Point = tuple[int, int, int, str, float | None]
"""Round, agent, step since the start of the run (from 1), metric and value."""


def _of_steps(rows: Iterable[Mapping[str, Any]], per_round: int) -> Iterator[_Point]:
    for row in rows:
        step = row["round"] * per_round + row["step"] + 1
        for name, value in row.items():
            if _drawn(name):
                yield row["round"], row["agent"], step, name, value


def _of_rounds(contents: RunContents) -> Iterator[_Point]:
    """Yield the means of rounds at their last steps, and the rewards of steps, which they keep."""
    for record in contents.rounds:
        first = record.round * contents.steps_per_round + 1
        for agent in record.agents:
            for step, reward in enumerate(agent.step_rewards, start=first):
                yield record.round, agent.agent, step, "reward", reward
            last = first + contents.steps_per_round - 1
            for name, value in agent.metrics.items():
                if _drawn(name) and not (name == "reward" and agent.step_rewards):
                    yield record.round, agent.agent, last, name, value
