"""The tables of a report as plain values, or as HTML in a notebook."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from evo_grpo.escaping import shorten
from evo_grpo.readers.report.page.build import Table, text
from evo_grpo.readers.terminal.result import cell, columns, redundant, scores
from evo_grpo.record.view import Run, RunView, view_of
from evo_grpo.record.wording import count, in_words, measured_on, number, with_error
from evo_grpo.schema.problems import short_name

COMPLETIONS = 2000
"""Completions in a page; a longer run shows the best and the worst of all, and the latest."""
CHARACTERS = 4000
"""Characters of a prompt or a completion in a page; a longer one is cut."""
EXTREMES = 200
"""The number of best completions, and of worst ones, that are always kept."""
_WITHIN_OTHERS = ("checkpoint", "tie")
"""Columns that the table leaves out, or shows within others; standard errors are in the scores."""
AGENTS = 16
"""Rows of the leaderboard that a notebook shows."""
WITHOUT = ("member", "parent", "round", "tokens", "wall_seconds")
"""Columns that a notebook leaves out, so that the others fit beside each other."""
_CELL_TAG = '<td style="white-space: nowrap">'  # notebooks break numbers at "-" and around "±"
_TITLES = {"wall_seconds": "seconds", "round": "last round", "left": "left after round"}


def leaderboard_table(view: RunView, without: Sequence[str] = ()) -> Table:
    """Return the leaderboard `without` some columns; rounds count from 1."""
    rows = view.leaderboard
    known = columns(rows, (*_WITHIN_OTHERS, *redundant(rows), *without))
    # The scores are beside the name: on a phone, only the first columns are in sight.
    first = [name for name in ("rank", "agent", *scores(rows)) if name in known]
    names = [*first, *(name for name in known if name not in first)]
    cells = [[_cell(name, row) for name in names] for row in rows]
    return Table([_title(name) for name in names], cells)


def completions_table(view: RunView) -> dict[str, Any]:
    """Return sample completions, newest first, and their total number."""
    rows = list(view.completions())
    chosen = _chosen(rows)
    return {
        "total": len(rows),
        "rows": [_completion(row) for row in reversed(chosen)],
    }


def _chosen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the completions to keep, in order: extremes of the reward, and the latest."""
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
        "rewards": _values(row.get("rewards")),
        "tokens": row.get("tokens"),
        "end": row.get("error") or ("" if row.get("ended") else "cut"),
        "prompt": shorten(str(row.get("prompt", "")), CHARACTERS),
        "answer": shorten(str(row.get("answer", "")), CHARACTERS),
        "completion": shorten(str(row.get("completion", "")), CHARACTERS),
    }


def _values(rewards: object) -> dict[str, float | None]:
    """Return the value of each reward function if there are several; earlier runs lack them."""
    known = cast("dict[str, Any]", rewards) if isinstance(rewards, dict) else {}
    return (
        {
            shorten(name, 40): float(value) if isinstance(value, int | float) else None
            for name, value in known.items()
        }
        if len(known) > 1
        else {}
    )


def _title(name: str) -> str:
    return _TITLES.get(name, short_name(name))


def _cell(name: str, row: Mapping[str, Any]) -> tuple[str, object]:
    value = row[name]
    if value is None:
        return "mean" if name == "agent" else "", None
    if name in ("round", "left"):
        return str(value + 1), value
    if name == "rank":
        return f"{value} (tie)" if row["tie"] else str(value), value
    if f"{name}_se" in row:
        return with_error(value, row[f"{name}_se"], 3), value
    return cell(name, value), value


def headline(view: RunView) -> list[tuple[str, str, str]]:
    """Return the numbers at the top of a report, each with a title and a description."""
    cards: list[tuple[str, str, str]] = []
    summary = view.summary
    winner, base = view.winner, view.base
    if summary is not None and winner is not None and winner.test is not None and base is not None:
        prompts = count(winner.test.n, f"{summary['split']} prompt")
        cards += [
            ("winner", with_error(winner.test.mean, winner.test.se, 3), f"on {prompts}"),
            ("base model", with_error(base.mean, base.se, 3), f"on the same {prompts}"),
            ("gain", _gain(summary), "paired, ± standard error"),
        ]
    elif winner is not None and winner.fitness is not None:
        fitness = winner.fitness
        title = "best reward" if fitness.steps else "best fitness"
        value = with_error(fitness.mean, fitness.se, 3)
        cards.append((title, value, f"on {measured_on(fitness)}"))
    cards += [
        ("rounds", f"{len(view.rounds)} of {view.planned}", count(view.agents, "agent")),
        ("tokens", f"{view.tokens:,}", "sampled in training"),
        ("time", in_words(view.seconds), "in rounds"),
    ]
    return cards


def _gain(summary: Mapping[str, Any]) -> str:
    if summary["gain"] is None:
        return "-"
    error = summary["gain_se"]
    return f"{summary['gain']:+.3f}" + ("" if error is None else f" ± {number(error)}")


def as_html(run: Run, title: str) -> str:
    """Return a run in HTML without scripts; its heading, `title`, is plain text."""
    view = view_of(run)
    sentences = [text(one.text) for one in view.story]
    if view.rounds:
        cards = headline(view)
        numbers = [f"{name} <b>{text(value)}</b> ({about})" for name, value, about in cards]
        sentences.insert(0, "; ".join(numbers))
    parts = [f"<p>{one}</p>" for one in (f"<b>{text(title)}</b>", *sentences)]
    table = leaderboard_table(view, WITHOUT)
    heads = "".join(f"<th>{text(name)}</th>" for name in table.titles)
    rows = "".join(
        f"<tr>{''.join(f'{_CELL_TAG}{text(shown)}</td>' for shown, _ in row)}</tr>"
        for row in table.rows[:AGENTS]
    )
    if table.rows:
        parts.append(f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>")
    if len(table.rows) > AGENTS:
        parts.append(f"<p>{len(table.rows) - AGENTS} more</p>")
    return "".join(parts)
