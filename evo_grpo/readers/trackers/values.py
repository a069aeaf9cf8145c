"""What trackers write of a step, a round and the end of a run, by the names of docs/metrics.md."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from evo_grpo.record import columns
from evo_grpo.record.log import RoundDone, RunFinished, StepDone
from evo_grpo.record.vocabulary import HYPERPARAMETER, SECONDS

if TYPE_CHECKING:
    from evo_grpo.record.log import Entry
    from evo_grpo.record.records import AgentRecord, RoundRecord

POPULATION = "population"
"""Owner of the values that belong to no single agent."""

_UNSUITABLE = re.compile(r"[^\w./ -]")
"""What MLflow, the strictest of them, refuses in the name of a metric."""


def of_agent(agent: int) -> str:
    """Return the name of an agent in trackers, which is that of its folders."""
    return f"agent-{agent:02d}"


@dataclass(frozen=True)
class Values:
    """What a tracker writes at one step.

    Attributes:
        step: GRPO steps of the run by then, from 1.
        values: By owner (`agent-03` or `population`), then by the name of the metric; finite
            numbers alone.
        texts: By owner.
    """

    step: int
    values: Mapping[str, Mapping[str, float]]
    texts: Mapping[str, str] = field(default_factory=dict[str, str])

    def side_by_side(self) -> dict[str, float]:
        """Return the values under names that put the agents of a metric into one chart.

        For trackers that sort charts by the part of a name before the slash: `reward/agent-03`,
        and for the population the name alone.
        """
        return {
            name if owner == POPULATION else f"{name}/{owner}": value
            for owner, values in self.values.items()
            for name, value in values.items()
        }

    def with_texts(self) -> dict[str, float | str]:
        """Return the same with the texts beside them, as wandb and trackio log them."""
        texts = {f"lineage/{owner}": text for owner, text in self.texts.items()}
        return {**self.side_by_side(), **texts}


def values_of(entry: Entry) -> Values | None:
    """Return what trackers write of an entry of the log; None for nothing."""
    match entry:
        case StepDone():
            agents = {of_agent(slot): finite(metrics) for slot, metrics in entry.agents.items()}
            return Values(entry.number, agents)
        case RoundDone():
            return _of_round(entry.number, entry.record)
        case RunFinished():
            return _of_end(entry.number, entry.summary)
        case _:
            return None


def _of_round(step: int, record: RoundRecord) -> Values:
    fitness = [f for agent in record.agents if math.isfinite(f := columns.fitness(agent))]
    population = {
        "round": float(record.round + 1),
        "agents": float(len(record.agents)),
        "tokens/training": float(sum(agent.tokens for agent in record.agents)),
        "tokens/evaluation": float(record.evaluation_tokens),
        **{f"{SECONDS}{phase}": spent for phase, spent in record.seconds.items()},
    }
    if fitness:
        population |= {"fitness/best": max(fitness), "fitness/mean": sum(fitness) / len(fitness)}
    # Those that mutate, and not what a person set after this one round.
    names = columns.hyperparameters([replace(record, steering=())])
    values = {of_agent(a.agent): _of_agent(a, names) for a in record.agents}
    texts = {of_agent(a.agent): life(a) for a in record.agents}
    if record.decisions:
        texts[POPULATION] = "\n\n".join(decision.sentence for decision in record.decisions)
    return Values(step, {**values, POPULATION: finite(population)}, texts)


def _of_end(step: int, summary: Mapping[str, Any]) -> Values:
    values = {
        f"test/{which}": float(summary[which]["mean"])
        for which in ("best", "base")
        if isinstance(summary.get(which), Mapping) and summary[which].get("mean") is not None
    }
    return Values(step, {POPULATION: finite(values)})


def life(agent: AgentRecord) -> str:
    """Return a sentence with the member, the parent and the changes of an agent."""
    text = f"member {agent.member}"
    if agent.parent is not None:
        text += f", from member {agent.parent} ({agent.mutation.op})"
    moved = [f"{name} {old:g} -> {new:g}" for name, (old, new) in agent.mutation.changes.items()]
    return f"{text}: {', '.join(moved)}" if moved else text


def finite(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the values that are finite, under names that every tracker takes."""
    return {
        _UNSUITABLE.sub("_", name): float(value)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }


def _of_agent(agent: AgentRecord, names: Sequence[str]) -> dict[str, float]:
    values: dict[str, float | None] = {
        "fitness": columns.fitness(agent),
        "fitness_se": columns.fitness_se(agent),
        "member": float(agent.member),
        "parent": agent.parent,
        "dead_steps": agent.metrics.get("dead_steps"),
        **{
            f"{HYPERPARAMETER}{name}": value
            for name, value in columns.values(agent.hparams, names).items()
        },
    }
    return finite(values)
