"""What a notebook shows of a run or a population: a few numbers and the leaderboard."""

from __future__ import annotations

from pathlib import Path

from evo_grpo.errors import EvoGrpoError
from evo_grpo.readers.report.contents import Run, contents_of, read_contents
from evo_grpo.readers.report.page.build import text
from evo_grpo.readers.report.tables import headline, leaderboard_table
from evo_grpo.record.story import tell_story

AGENTS = 16
"""Agents of the leaderboard that are shown."""


class RunFolder(type(Path())):
    """The path of a run folder, which a notebook shows as the result of the run."""

    def _repr_html_(self) -> str | None:
        try:
            return as_html(read_contents(self), f"run folder: {self}")
        except EvoGrpoError:  # as it were another path
            return None


def as_html(run: Run, title: str) -> str:
    """Return a run in HTML without scripts; its heading, `title`, is plain text."""
    contents = contents_of(run)
    parts = [f"<p><b>{text(title)}</b></p>"]
    if not contents.rounds:
        return parts[0] + "<p>no round is finished yet</p>"
    numbers = "; ".join(f"{name} <b>{text(value)}</b>" for name, value, _ in headline(contents))
    sentences = (text(one.text) for one in tell_story(contents.rounds, contents.summary))
    parts += [f"<p>{numbers}</p>", *(f"<p>{one}</p>" for one in sentences)]
    table = leaderboard_table(contents)
    heads = "".join(f"<th>{text(name)}</th>" for name in table.titles)
    rows = "".join(
        f"<tr>{''.join(f'<td>{text(shown)}</td>' for shown, _ in row)}</tr>"
        for row in table.rows[:AGENTS]
    )
    parts.append(f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>")
    if len(table.rows) > AGENTS:
        parts.append(f"<p>{len(table.rows) - AGENTS} more</p>")
    return "".join(parts)
