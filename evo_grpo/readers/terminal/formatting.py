"""Rounds as short strings, the same in a live table and in plain lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from evo_grpo.record.columns import fitness
from evo_grpo.record.family import best_agent
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.wording import changes_text, count, number, with_error
from evo_grpo.schema.hparams import Value

ALWAYS_SHOWN = ("lr", "beta", "clip_coef", "group_size")


def shown_names(hyperparameters: Iterable[str]) -> list[str]:
    """Return the hyperparameters with a column: the common ones, then the given ones."""
    given = ("clip_coef" if name.startswith("clip_") else name for name in hyperparameters)
    return list(dict.fromkeys((*ALWAYS_SHOWN, *given)))


def direction(changes: Mapping[str, tuple[Value, Value]], name: str) -> str:
    """Return "up" or "down" for a number that a mutation changed, else an empty string."""
    ends = ("clip_coef", "clip_low", "clip_high") if name == "clip_coef" else (name,)
    for end in ends:
        if end in changes:
            old, new = changes[end]
            if not isinstance(old, str | bool) and not isinstance(new, str | bool):
                return "up" if new > old else "down"
    return ""


def clock(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds: 0:01:05, and 27:00:00 for more than a day."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def round_line(record: RoundRecord, rounds: int) -> str:
    """Return the result of a round in one line; the whole run has `rounds`."""
    best = best_agent(record)
    means = [mean for agent in record.agents if math.isfinite(mean := fitness(agent))]
    tokens = sum(agent.tokens for agent in record.agents)
    parts = [f"round {record.round + 1}/{rounds}"]
    if best is not None and best.score is not None:
        score = with_error(best.score.mean, best.score.se, 3)
        what = "best reward" if best.score.steps else "best"
        parts.append(f"{what} {score} (agent {best.agent})")
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
    """Return the changes between a round and the next that its decisions do not contain.

    Returns:
        "copied" -> "0 -> 1, ..." for copies without a recorded decision, and "mutated" ->
        "1: clip 0.2 -> 0.16; ...", without the lr of a copy, which its decision contains. A key is
        missing where nothing changed.
    """
    slots = {agent.member: agent.agent for agent in record.agents}
    decided = {one.agent for one in record.decisions if one.kind in ("copied", "restored")}
    copies: list[str] = []
    mutations: list[str] = []
    for member in record.members:
        if member.id in slots or member.mutation.op.startswith("steer-"):
            continue  # it is unchanged, or steered, which is a decision
        source = slots.get(member.parent) if member.parent is not None else None
        if source is not None and source != member.agent and member.agent not in decided:
            copies.append(f"{source}{arrow}{member.agent}")
        changes = dict(member.mutation.changes)
        if member.agent in decided:
            changes.pop("lr", None)
        if changes:
            mutations.append(f"{member.agent}: {changes_text(changes, arrow)}")
    found = {"copied": ", ".join(copies), "mutated": "; ".join(mutations)}
    return {name: details for name, details in found.items() if details}
