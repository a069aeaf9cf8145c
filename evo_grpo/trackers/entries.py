"""What trackers are told of steps, rounds and the end of a run, in the words of the vocabulary."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evo_grpo.record import columns
from evo_grpo.record.vocabulary import HYPERPARAMETER, SECONDS
from evo_grpo.trackers.told import POPULATION, Entry

if TYPE_CHECKING:
    from evo_grpo.record.records import AgentRecord, RoundRecord

_UNSUITABLE = re.compile(r"[^\w./ -]")
"""What MLflow, the strictest of them, refuses in the name of a metric."""


def of_agent(agent: int) -> str:
    """Return how trackers call an agent: the name of its folders."""
    return f"agent-{agent:02d}"


def step_entry(step: int, metrics: Mapping[Any, Mapping[str, float]]) -> Entry:
    """Return the entry of a GRPO step.

    Args:
        step: Steps taken, this one too.
        metrics: By slot.
    """
    return Entry(step, 0, {of_agent(slot): finite(values) for slot, values in metrics.items()})


def round_entry(step: int, record: RoundRecord) -> Entry:
    """Return the entry of a round.

    Args:
        step: Steps taken by its end.
        record: The round.
    """
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
    names = columns.hyperparameters([record])
    values = {of_agent(a.agent): _of_agent(a, names) for a in record.agents}
    texts = {of_agent(a.agent): life(a) for a in record.agents}
    if record.decisions:
        texts[POPULATION] = "\n\n".join(decision.sentence for decision in record.decisions)
    return Entry(step, 1, {**values, POPULATION: finite(population)}, texts)


def end_entry(step: int, summary: Mapping[str, Any]) -> Entry:
    """Return the entry of the end of a run.

    Args:
        step: Steps taken.
        summary: What summary.json holds.
    """
    values = {
        f"test/{who}": float(summary[who]["mean"])
        for who in ("best", "base")
        if isinstance(summary.get(who), Mapping) and summary[who].get("mean") is not None
    }
    return Entry(step, 2, {POPULATION: finite(values)})


def life(agent: AgentRecord) -> str:
    """Return in words who an agent is: its member, where it comes from, and what moved."""
    text = f"member {agent.member}"
    if agent.parent is not None:
        text += f", from member {agent.parent} ({agent.mutation.op})"
    moved = [f"{name} {old:g} -> {new:g}" for name, (old, new) in agent.mutation.changes.items()]
    return f"{text}: {', '.join(moved)}" if moved else text


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values that are numbers, under names that every tracker takes."""
    return {
        _UNSUITABLE.sub("_", name): float(value)
        for name, value in values.items()
        if math.isfinite(value)
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
    return finite({name: value for name, value in values.items() if value is not None})
