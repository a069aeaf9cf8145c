"""The values that trackers write for steps, rounds and the end of a run; see docs/metrics.md."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from evo_grpo.record import columns
from evo_grpo.record.log import RoundDone, RunFinished, StepDone
from evo_grpo.record.vocabulary import HYPERPARAMETER, SECONDS, VALIDATION
from evo_grpo.record.wording import changes_text

if TYPE_CHECKING:
    from evo_grpo.record.log import Entry
    from evo_grpo.record.records import AgentRecord, RoundRecord

POPULATION = "population"
"""Owner of values that do not belong to one agent."""

_UNSUITABLE = re.compile(r"[^\w./ -]")
"""Characters that MLflow, the strictest tracker, rejects in the name of a metric."""


def of_agent(agent: int) -> str:
    """Return the name of an agent in trackers, which is also the name of its folders."""
    return f"agent-{agent:02d}"


@dataclass(frozen=True)
class Values:
    """The values that a tracker writes at one step.

    Attributes:
        step: GRPO steps of the run including this one, >= 1.
        values: Finite numbers by owner (`agent-03` or `population`) and name of the metric.
        texts: Texts by owner.
    """

    step: int
    values: Mapping[str, Mapping[str, float]]
    texts: Mapping[str, str] = field(default_factory=dict[str, str])

    def side_by_side(self) -> dict[str, float]:
        """Return the values under names such as `reward/agent-03`.

        Trackers that group charts by the part before the slash show all agents of a metric
        together. The values of the population have the name of the metric only.
        """
        return {
            name if owner == POPULATION else f"{name}/{owner}": value
            for owner, values in self.values.items()
            for name, value in values.items()
        }

    def with_texts(self) -> dict[str, float | str]:
        """Return `side_by_side` and the texts in one mapping, for wandb and trackio."""
        texts = {f"lineage/{owner}": text for owner, text in self.texts.items()}
        return {**self.side_by_side(), **texts}


def values_of(entry: Entry) -> Values | None:
    """Return the values of an entry of the log; None if it has none."""
    texts: Mapping[str, str] = {}
    match entry:
        case StepDone():
            table = {of_agent(slot): metrics for slot, metrics in entry.agents.items()}
        case RoundDone():
            table, texts = _of_round(entry.record), _texts(entry.record)
        case RunFinished():
            tested = {f"test/{which}": entry.summary.get(which) for which in ("best", "base")}
            table = {POPULATION: {n: one.get("mean") for n, one in tested.items() if one}}
        case _:
            return None
    return Values(entry.number, {owner: finite(own) for owner, own in table.items()}, texts)


def _of_round(record: RoundRecord) -> dict[str, dict[str, float | None]]:
    # Rewards of training are logged by step: they are no fitness.
    evaluated = [agent for agent in record.agents if columns.was_evaluated(agent)]
    fitness = [f for agent in evaluated if math.isfinite(f := columns.fitness(agent))]
    population: dict[str, float | None] = {
        "round": record.round + 1,
        "agents": len(record.agents),
        "tokens/training": sum(agent.tokens for agent in record.agents),
        "tokens/evaluation": record.evaluation_tokens,
        **{f"{SECONDS}{phase}": spent for phase, spent in record.seconds.items()},
        "fitness/best": max(fitness, default=None),
        "fitness/mean": sum(fitness) / len(fitness) if fitness else None,
    }
    # The hyperparameters that mutate, without those that a request set after this round.
    names = columns.hyperparameters([replace(record, steering=())])
    return {
        **{of_agent(a.agent): _of_agent(a, names) for a in record.agents},
        POPULATION: population,
    }


def _texts(record: RoundRecord) -> dict[str, str]:
    names = columns.hyperparameters([replace(record, steering=())])
    texts = {of_agent(agent.agent): life(agent, names) for agent in record.agents}
    if record.decisions:
        texts[POPULATION] = "\n\n".join(decision.sentence for decision in record.decisions)
    return texts


def life(agent: AgentRecord, names: Sequence[str]) -> str:
    """Return a sentence with the member, the parent, the changes and the choices of an agent.

    Choices, such as a prompt or a loss, are those of the searched `names` that are no numbers.
    """
    text = f"member {agent.member}"
    if agent.parent is not None:
        text += f", from member {agent.parent} ({agent.mutation.op})"
    if moved := changes_text(agent.mutation.changes):
        text += f": {moved}"
    values = columns.values(agent.hparams, names).items()
    chosen = [f"{name} {value}" for name, value in values if isinstance(value, str | bool)]
    return f"{text}; {', '.join(chosen)}" if chosen else text


def finite(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the finite values, under names that every tracker accepts."""
    return {
        _UNSUITABLE.sub("_", name): float(value)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }


def _of_agent(agent: AgentRecord, names: Sequence[str]) -> dict[str, float | None]:
    further = () if agent.score is None else agent.score.further
    rewards = () if agent.score is None or len(agent.score.rewards) < 2 else agent.score.rewards
    evaluated = columns.was_evaluated(agent)
    return {
        "fitness": columns.fitness(agent) if evaluated else None,
        "fitness_se": columns.fitness_se(agent) if evaluated else None,
        **{columns.objective(one.name): one.mean for one in further},
        **{f"{columns.objective(one.name)}_se": one.se for one in further},
        **{f"{VALIDATION}{one.name}": one.mean for one in rewards},
        "member": agent.member,
        "parent": agent.parent,
        "dead_steps": agent.metrics.get("dead_steps"),
        "rank_error": agent.metrics.get("rank_error"),
        **{
            f"{HYPERPARAMETER}{name}": value
            for name, value in columns.values(agent.hparams, names).items()
            if not isinstance(value, str | bool)  # a tracker draws numbers
        },
    }
