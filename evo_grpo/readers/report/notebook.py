"""A run or a population in a notebook: a few numbers, the story and the leaderboard."""

from __future__ import annotations

from evo_grpo.readers.report.page.build import text
from evo_grpo.readers.report.tables import headline, leaderboard_table
from evo_grpo.record.view import Run, view_of

AGENTS = 16
"""Rows of the leaderboard that are shown."""
WITHOUT = ("member", "parent", "round", "tokens", "wall_seconds")
"""Columns that are left out, so that the others fit beside each other."""
_CELL = '<td style="white-space: nowrap">'  # notebooks break numbers at "-" and around "±"


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
        f"<tr>{''.join(f'{_CELL}{text(shown)}</td>' for shown, _ in row)}</tr>"
        for row in table.rows[:AGENTS]
    )
    if table.rows:
        parts.append(f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>")
    if len(table.rows) > AGENTS:
        parts.append(f"<p>{len(table.rows) - AGENTS} more</p>")
    return "".join(parts)
