"""Numbers, mutations and rounds as short strings, the same on every display."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.schema.hparams import Hparams

ALWAYS_SHOWN = ("lr", "beta", "clip_coef", "group_size")
SHORT_NAMES = {"clip_coef": "clip", "group_size": "group"}


def count(amount: int, noun: str) -> str:
    """Return an amount with its noun: 1 round, 6 rounds."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with some digits after the point, "-" for None and NaN."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.{digits}f}"


def setting(value: object) -> str:
    """Return the value of a hyperparameter in three significant digits; a pair as low:high."""
    if isinstance(value, tuple | list):
        return ":".join(setting(end) for end in value)
    return f"{value:.3g}" if isinstance(value, int | float) else "-"


def shown_names(hyperparameters: Iterable[str]) -> list[str]:
    """Return the hyperparameters that get a column: the common ones, then those given."""
    given = ("clip_coef" if name.startswith("clip_") else name for name in hyperparameters)
    return list(dict.fromkeys((*ALWAYS_SHOWN, *given)))


def short_name(name: str) -> str:
    """Return a hyperparameter's name as columns and mutations spell it."""
    return SHORT_NAMES.get(name, name)


def hyperparameter(hparams: Hparams, name: str) -> str:
    """Return one hyperparameter of an agent as a string."""
    return setting(getattr(hparams, name))


def direction(changes: Mapping[str, tuple[float, float]], name: str) -> str:
    """Return "up" or "down" for a hyperparameter that a mutation moved, else an empty string."""
    ends = ("clip_coef", "clip_low", "clip_high") if name == "clip_coef" else (name,)
    for end in ends:
        if end in changes:
            old, new = changes[end]
            return "up" if new > old else "down"
    return ""


def changes_text(changes: Mapping[str, tuple[float, float]]) -> str:
    """Return what a mutation moved, for instance "lr 0.001 -> 0.0012"."""
    return ", ".join(
        f"{short_name(name)} {old:.3g} -> {new:.3g}" for name, (old, new) in changes.items()
    )


def best_of(agents: Sequence[AgentRecord]) -> AgentRecord | None:
    """Return the agent with the greatest fitness, of equal ones the first; None without any."""
    scored = [agent for agent in agents if agent.score is not None and agent.state == "ok"]
    return max(scored, key=lambda a: a.score.mean if a.score else 0.0, default=None)


def round_line(record: RoundRecord, rounds: int) -> str:
    """Return the outcome of a round in one line."""
    best = best_of(record.agents)
    means = [a.score.mean for a in record.agents if a.score is not None]
    tokens = sum(agent.tokens for agent in record.agents)
    parts = [f"round {record.round + 1}/{rounds}"]
    if best is not None and best.score is not None:
        parts.append(
            f"best {number(best.score.mean)} +- {number(best.score.se)} (agent {best.agent})"
        )
        parts.append(f"mean {number(sum(means) / len(means))}")
    parts += [f"{tokens:,} tokens", f"{sum(record.seconds.values()):.1f} s"]
    dropped = sum(agent.metrics.get("dropped", 0.0) for agent in record.agents)
    if dropped:
        parts.append(f"dropped {int(dropped)} episodes")
    aside = sum(agent.metrics.get("set_aside", 0.0) for agent in record.agents)
    if aside:
        parts.append(f"set aside {count(int(aside), 'group')}")
    failed = [str(agent.agent) for agent in record.agents if agent.state != "ok"]
    if failed:
        parts.append(f"failed: agent {', '.join(failed)}")
    return "  ".join(parts)


def evolution(record: RoundRecord) -> dict[str, str]:
    """Return what changed between a round and the next beyond its decisions, agents by slot.

    Returns:
        "copied" -> "0 -> 1, ..." for copies without a recorded decision, and "mutated" ->
        "1: clip 0.2 -> 0.16; ..."; the sentence about a copy tells its lr. A key is missing where
        there is nothing to tell.
    """
    slots = {agent.member: agent.agent for agent in record.agents}
    told = {one.agent for one in record.decisions if one.kind in ("copied", "restored")}
    copies: list[str] = []
    mutations: list[str] = []
    for member in record.members:
        if member.id in slots or member.mutation.op.startswith("steer-"):
            continue  # it survived unchanged, or a decision tells what was done by hand
        source = slots.get(member.parent) if member.parent is not None else None
        if source is not None and source != member.agent and member.agent not in told:
            copies.append(f"{source} -> {member.agent}")
        changes = dict(member.mutation.changes)
        if member.agent in told:
            changes.pop("lr", None)
        if changes:
            mutations.append(f"{member.agent}: {changes_text(changes)}")
    found = {"copied": ", ".join(copies), "mutated": "; ".join(mutations)}
    return {what: details for what, details in found.items() if details}
