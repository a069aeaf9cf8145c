"""The result of a run as tables and trees: the leaderboard and the family tree."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from evo_grpo.printable import printable
from evo_grpo.readers.terminal.console import GOOD, NOTICE, new_table, safe
from evo_grpo.readers.terminal.formatting import ALWAYS_SHOWN
from evo_grpo.record.wording import changes_text, number
from evo_grpo.schema.shown import short_name, shown_value

if TYPE_CHECKING:
    import pandas as pd

    from evo_grpo.record.family import FamilyMember

BEST = f"bold {GOOD}"
STRINGS = ("checkpoint",)
IN_OTHERS = ("round", "fitness_se", "tie")
"""Columns of the frame that the table shows in others: in left, fitness and rank."""
ONLY_WIDE = ("parent", "tokens", "wall_seconds", "checkpoint")
WIDE = 150
"""Width of a terminal from which on the table shows all columns."""
MADE = {
    "restore": "restored",
    "steer-clone": "cloned by hand",
    "steer-set": "set by hand",
    "steer-restore": "restored, then steered by hand",
}
"""What the tree says of members that no selection or mutation made."""
ONLY_MEDIUM = ("member",)
MEDIUM = 90
"""Width from which on it shows all but the widest."""


def leaderboard_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a leaderboard as mappings of plain values, with None for a missing one."""
    return [
        {str(name): _plain(value) for name, value in row.items()}
        for row in frame.astype(object).to_dict(orient="records")
    ]


def leaderboard_json(frame: pd.DataFrame) -> str:
    """Return a leaderboard as a JSON list of rows."""
    return json.dumps(leaderboard_rows(frame), indent=2)


def leaderboard_markdown(frame: pd.DataFrame) -> str:
    """Return a leaderboard as a Markdown table."""
    names = [str(name) for name in frame.columns]
    lines = [names, ["---" if name in STRINGS else "---:" for name in names]]
    lines += [
        [printable(_cell(name, row[name])).replace("|", "\\|") for name in names]
        for row in leaderboard_rows(frame)
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def leaderboard_table(frame: pd.DataFrame, width: int) -> Table:
    """Return a leaderboard as a table: those that are left, best first, then those that left.

    A rank says "tie" where a paired test cannot tell the agent from the first; rounds count from 1.
    A terminal of few columns (`width`) gets the essential ones only.
    """
    rows = leaderboard_rows(frame)
    names = [str(name) for name in frame.columns if name not in IN_OTHERS]
    names.remove("left")
    if frame["left"].notna().any():
        names.append("left")
    if width < WIDE:
        # The bounds say nothing more than clip_coef, unless it is a pair and no number.
        bounds = ("clip_coef",) if frame["clip_coef"].isna().any() else ("clip_low", "clip_high")
        names = [name for name in names if name not in (*ONLY_WIDE, *bounds)]
    if width < MEDIUM:
        names = [name for name in names if name not in ONLY_MEDIUM]
    # What is the same for all says nothing of who is better: it makes room for what is not.
    alike = [name for name in ALWAYS_SHOWN if len({str(row[name]) for row in rows}) == 1]
    while alike and _width(names, rows) > width:
        names = [name for name in names if name != alike[-1]]
        alike.pop()
    short = _width(names, rows) > width
    return _table(names, rows, short=short)


def _width(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the columns of a terminal that a leaderboard needs."""
    titles = (0 if name == "left" else len(short_name(name)) for name in names)
    cells = (max((len(_shown_cell(name, row)) for row in rows), default=0) for name in names)
    return sum(map(max, titles, cells)) + 2 * (len(names) - 1)


def _table(names: Sequence[str], rows: Sequence[Mapping[str, Any]], *, short: bool) -> Table:
    """Return some columns of a leaderboard; short cells where there is little room."""
    table = new_table()
    for name in names:
        justify = "left" if name in (*STRINGS, "rank", "left") else "right"
        # The cells of those that left say what the column is.
        title = "" if name == "left" else short_name(name)
        table.add_column(title, justify=justify, no_wrap=True)
    for row in rows:
        style = BEST if row["rank"] == 1 else "dim" if row["left"] is not None else None
        cells = (safe(_shown_cell(name, row, short=short)) for name in names)
        table.add_row(*cells, style=style)
    return table


def family_tree(
    founders: Sequence[FamilyMember], title: str, summary: Mapping[str, Any] | None = None
) -> Tree:
    """Return the family tree of a run: one branch per member, bold if alive in the last round.

    A mean that won has a branch of its own, the last one, which names both of its parents. Who won
    stands in `summary`, what summary.json holds; without it the best of the last round is taken.
    """
    root = Tree(safe(title, "bold"), guide_style="dim")
    if summary is None:
        # The last fitness of a member decides who is best, as on the leaderboard.
        alive = [one for founder in founders for one in _with_descendants(founder) if one.alive]
        first = max(alive, key=lambda one: (_last_fitness(one), -one.agent), default=None)
        best = None if first is None else first.id
    else:
        best = summary["best"]["member"]
    for founder in founders:
        _add_branch(root, founder, best)
    if summary is not None and summary["best"]["kind"] == "mean":
        root.add(_mean_label(founders, summary))
    return root


def _mean_label(founders: Sequence[FamilyMember], summary: Mapping[str, Any]) -> Text:
    mean = summary["best"]
    members = [one for founder in founders for one in _with_descendants(founder)]
    agents = {one.id: one.agent for one in members}
    label = safe(f"member {mean['member']}", BEST)
    first, second = mean["parents"]
    label.append_text(safe(f"  mean of members {first} and {second}", NOTICE))
    label.append_text(safe(f" (agents {agents[first]} and {agents[second]})", "dim"))
    (own,) = [one for one in summary["candidates"] if one["kind"] == "mean"]
    if own["validation"] is not None:
        label.append_text(safe(f"  {number(own['validation']['mean'])}", BEST))
    label.append_text(safe("  best", BEST))
    return label


def _add_branch(parent: Tree, member: FamilyMember, best: int | None) -> None:
    style = BEST if member.id == best else "bold" if member.alive else ""
    label = safe(f"member {member.id}", style)
    # Rounds count from 1 on a screen; records and file names count from 0.
    first, last = member.born + 1, member.born + len(member.fitness)
    lived = f"round {first}" if last == first else f"rounds {first}-{last}"
    label.append_text(safe(f"  agent {member.agent}, {lived}", "dim"))
    label.append_text(safe(f"  {_first_and_last(member.fitness)}", style))
    made = [MADE[member.mutation.op]] if member.mutation.op in MADE else []
    if member.mutation.changes:
        made.append(changes_text(member.mutation.changes))
    if made:
        label.append_text(safe(f"  {', '.join(made)}", NOTICE))
    elif member.parent is None:
        label.append_text(safe(f"  lr {shown_value(member.hparams.lr)}", "dim"))
    if member.id == best:
        label.append_text(safe("  best", BEST))
    branch = parent.add(label)
    for child in member.children:
        _add_branch(branch, child, best)


def _with_descendants(member: FamilyMember) -> Iterator[FamilyMember]:
    yield member
    for child in member.children:
        yield from _with_descendants(child)


def _last_fitness(member: FamilyMember) -> float:
    last = member.fitness[-1]
    return -math.inf if last is None else last


def _first_and_last(fitness: Sequence[float | None]) -> str:
    ends = [fitness[0], fitness[-1]] if len(fitness) > 1 else [fitness[0]]
    return " -> ".join("failed" if value is None else number(value) for value in ends)


def _plain(value: Any) -> Any:  # noqa: ANN401 -- a cell of a frame
    # pandas has its own missing value, and its numbers are numpy's: neither is JSON.
    if value is None or type(value).__name__ == "NAType":
        return None
    plain = value.item() if hasattr(value, "item") else value
    return None if isinstance(plain, float) and math.isnan(plain) else plain


def _shown_cell(name: str, row: Mapping[str, Any], *, short: bool = False) -> str:
    """Return a cell of the table, with what belongs to it from other columns."""
    value = row[name]
    if name == "rank":
        return f"{value} tie" if row["tie"] else str(value)
    if name == "left":
        after = "left in" if short else "left after round"
        return "" if value is None else f"{after} {value + 1}"
    if name == "fitness" and value is not None:
        error = row["fitness_se"]
        return number(value, 2) + ("" if error is None or short else f" ±{number(error, 2)}")
    return _cell(name, value)


def _cell(name: str, value: Any) -> str:  # noqa: ANN401 -- a cell of a frame
    if value is None:
        return "-"
    if name in ("fitness", "fitness_se"):
        return number(value)
    if name == "wall_seconds":
        return number(value, 1)
    if name == "tokens":
        return f"{value:,}"
    return shown_value(value) if isinstance(value, float) else str(value)
