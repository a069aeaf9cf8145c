"""The tables of a report, as plain values: leaderboard, completions, headline numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from evo_grpo.printable import cut
from evo_grpo.readers.report.contents import RunContents
from evo_grpo.readers.report.page.build import Table
from evo_grpo.readers.terminal.result import leaderboard_rows
from evo_grpo.record.leaderboard import from_records
from evo_grpo.record.wording import number, with_error
from evo_grpo.schema.shown import short_name, shown_value

COMPLETIONS = 2000
"""Completions in a page; of a longer run the best and the worst of all, and the latest."""
CHARACTERS = 4000
"""Longest prompt or completion in a page."""
EXTREMES = 200
"""Of the best, and of the worst, how many are kept at least."""
_HIDDEN = ("checkpoint",)


def leaderboard_table(contents: RunContents) -> Table:
    """Return the leaderboard; rounds count from 1."""
    frame = from_records(contents.rounds)
    names = [str(name) for name in frame.columns if name not in (*_HIDDEN, "fitness_se", "tie")]
    rows = [[_cell(name, row) for name in names] for row in leaderboard_rows(frame)]
    return Table([_title(name) for name in names], rows)


def completions_table(contents: RunContents) -> dict[str, Any]:
    """Return sample completions, newest first, and how many there were in all."""
    rows = list(contents.completions([record.round for record in contents.rounds]))
    chosen = _chosen(rows)
    return {
        "total": len(rows),
        "rows": [_completion(row) for row in reversed(chosen)],
    }


def _chosen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the completions to keep, in their order: extremes of the reward, and the latest."""
    if len(rows) <= COMPLETIONS:
        return rows
    order = sorted(range(len(rows)), key=lambda i: _reward(rows[i]))
    kept = {*order[:EXTREMES], *order[-EXTREMES:]}
    for index in range(len(rows) - 1, -1, -1):
        if len(kept) >= COMPLETIONS:
            break
        kept.add(index)
    return [rows[index] for index in sorted(kept)]


def _reward(row: Mapping[str, Any]) -> float:
    value = row.get("reward")
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return -math.inf


def _completion(row: Mapping[str, Any]) -> dict[str, Any]:
    reward = _reward(row)
    return {
        "round": row.get("round", 0) + 1,
        "agent": row.get("agent"),
        "reward": None if reward == -math.inf else reward,
        "tokens": row.get("tokens"),
        "end": row.get("error") or ("" if row.get("ended") else "cut"),
        "prompt": cut(str(row.get("prompt", "")), CHARACTERS),
        "completion": cut(str(row.get("completion", "")), CHARACTERS),
    }


def _title(name: str) -> str:
    return {"wall_seconds": "seconds", "round": "last round"}.get(name, short_name(name))


def _cell(name: str, row: Mapping[str, Any]) -> tuple[str, object]:
    value = row[name]
    if value is None:
        return "", None
    if name in ("round", "left"):
        return str(value + 1), value
    if name == "rank":
        return f"{value} (tie)" if row["tie"] else str(value), value
    if name == "fitness":
        return with_error(value, row["fitness_se"], 3), value
    if name == "tokens":
        return f"{value:,}", value
    if name == "wall_seconds":
        return number(value, 1), value
    return shown_value(value) if isinstance(value, float) else str(value), value


def headline(contents: RunContents) -> list[tuple[str, str, str]]:
    """Return the numbers at the top of a report: title, value, and what it means."""
    tokens = sum(agent.tokens for record in contents.rounds for agent in record.agents)
    seconds = sum(sum(record.seconds.values()) for record in contents.rounds)
    agents = {agent.agent for record in contents.rounds for agent in record.agents}
    cards: list[tuple[str, str, str]] = []
    summary = contents.summary
    if summary is not None:
        base, best = summary["base"], summary["best"]
        tested = f"{best['n']} test prompts that nothing was selected on"
        cards += [
            ("winner", with_error(best["mean"], best["se"], 3), tested),
            ("base model", with_error(base["mean"], base["se"], 3), "the same prompts"),
            ("gain", _gain(summary), "paired, ± standard error"),
        ]
    cards += [
        ("rounds", f"{len(contents.rounds)} of {contents.planned}", f"{len(agents)} agents"),
        ("tokens", f"{tokens:,}", "sampled in training"),
        ("time", _duration(seconds), "in rounds"),
    ]
    return cards


def _gain(summary: Mapping[str, Any]) -> str:
    if summary["gain"] is None:
        return "-"
    error = summary["gain_se"]
    return f"{summary['gain']:+.3f}" + ("" if error is None else f" ± {number(error)}")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
