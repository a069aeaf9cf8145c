"""Rounds as short strings, the same on every display."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.wording import changes_text, count, number, with_error

ALWAYS_SHOWN = ("lr", "beta", "clip_coef", "group_size")


def shown_names(hyperparameters: Iterable[str]) -> list[str]:
    """Return the hyperparameters that get a column: the common ones, then those given."""
    given = ("clip_coef" if name.startswith("clip_") else name for name in hyperparameters)
    return list(dict.fromkeys((*ALWAYS_SHOWN, *given)))


def direction(changes: Mapping[str, tuple[float, float]], name: str) -> str:
    """Return "up" or "down" for a hyperparameter that a mutation moved, else an empty string."""
    ends = ("clip_coef", "clip_low", "clip_high") if name == "clip_coef" else (name,)
    for end in ends:
        if end in changes:
            old, new = changes[end]
            return "up" if new > old else "down"
    return ""


def best_of(agents: Sequence[AgentRecord]) -> AgentRecord | None:
    """Return the agent with the greatest fitness, of equal ones the first; None without any."""
    scored = [agent for agent in agents if agent.score is not None and agent.state == "ok"]
    return max(scored, key=lambda a: a.score.mean if a.score else 0.0, default=None)


def clock(seconds: float) -> str:
    """Return a time as a clock shows it: 0:01:05, and 27:00:00 beyond a day."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def round_line(record: RoundRecord, rounds: int) -> str:
    """Return the outcome of a round in one line; the whole run has `rounds`."""
    best = best_of(record.agents)
    means = [a.score.mean for a in record.agents if a.score is not None]
    tokens = sum(agent.tokens for agent in record.agents)
    parts = [f"round {record.round + 1}/{rounds}"]
    if best is not None and best.score is not None:
        score = with_error(best.score.mean, best.score.se, 3)
        parts.append(f"best {score} (agent {best.agent})")
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


def evolution(record: RoundRecord, arrow: str = " -> ") -> dict[str, str]:
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
            copies.append(f"{source}{arrow}{member.agent}")
        changes = dict(member.mutation.changes)
        if member.agent in told:
            changes.pop("lr", None)
        if changes:
            mutations.append(f"{member.agent}: {changes_text(changes, arrow)}")
    found = {"copied": ", ".join(copies), "mutated": "; ".join(mutations)}
    return {what: details for what, details in found.items() if details}
