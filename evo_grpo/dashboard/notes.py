"""What the notes of a study and of its trials say, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from evo_grpo.record import columns
from evo_grpo.types import Slot

if TYPE_CHECKING:
    from evo_grpo.record.records import AgentRecord, RoundRecord
    from evo_grpo.settings import RunConfig


def trial_note(agent: AgentRecord, record: RoundRecord) -> str:
    """Return who an agent is, what it descends from, and what was decided about it.

    Args:
        agent: The agent.
        record: Its round.
    """
    lines = [f"**Agent {agent.agent} in round {record.round + 1}**, member {agent.member}", ""]
    if agent.parent is None:
        lines.append("- of the first population")
    else:
        lines.append(f"- from member {agent.parent}: {agent.mutation.op}")
    lines += [f"- {name}: {old:g} → {new:g}" for name, (old, new) in agent.mutation.changes.items()]
    if agent.state == "ok" and agent.score is not None:
        fitness, error = columns.fitness(agent), columns.fitness_se(agent)
        lines.append(f"- fitness {fitness:.4f} ± {error:.4f}")
    else:
        lines.append(f"- failed: {_plain(agent.reason)}")
    sentences = _decided(record).get(agent.agent, ())
    return "\n".join([*lines, *(f"- {_plain(sentence)}" for sentence in sentences)])


def study_note(folder: Path, config: RunConfig, original: str) -> str:
    """Return what a run is, and what this copy of its study is not.

    Args:
        folder: The run folder.
        config: Its settings.
        original: Where the study itself is kept, empty where there is none.
    """
    population = config.population
    kept = f" The study itself is in {_code(original)}." if original else ""
    return "\n".join(
        [
            f"**{_plain(config.name)}**: {_code(config.model.name)} on {_code(config.env.kind)}, "
            f"{population.size} agents, {population.rounds} rounds of "
            f"{population.steps_per_round} steps, seed {config.seed}",
            "",
            f"A copy of the run in {_code(str(folder))}, made from its records and kept up with "
            f"them. What you change here is gone when this dashboard ends.{kept}",
        ]
    )


def _decided(record: RoundRecord) -> Mapping[Slot, list[str]]:
    found: dict[Slot, list[str]] = {}
    for decision in record.decisions:
        found.setdefault(decision.agent, []).append(decision.sentence)
    return found


def _plain(text: str) -> str:
    """Return a text without what Markdown or HTML would take for markup."""
    return "".join(f"&#{ord(one)};" if one in "<>&`*_[]()|\\" else one for one in text)


def _code(text: str) -> str:
    return f"`{text.replace('`', '')}`"
