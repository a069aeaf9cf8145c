"""What came of a run: the leaderboard, the family tree, the line that compares base and best."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from evo_grpo.cli.terminal.text import changed, number, setting

if TYPE_CHECKING:
    import pandas as pd

    from evo_grpo.record.family import FamilyMember

TEXTS = ("checkpoint",)
LEFT_OUT = ("parent", "round", "fitness_se", "tokens", "wall_seconds", "checkpoint")
WIDE = 170
"""Columns that the whole leaderboard takes."""


def records_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a leaderboard as plain rows, with None for what is missing."""
    return [
        {str(name): _plain(value) for name, value in row.items()}
        for row in frame.astype(object).to_dict(orient="records")
    ]


def as_json(frame: pd.DataFrame) -> str:
    """Return a leaderboard as a JSON list of rows."""
    return json.dumps(records_of(frame), indent=2)


def as_markdown(frame: pd.DataFrame) -> str:
    """Return a leaderboard as a Markdown table."""
    names = [str(name) for name in frame.columns]
    lines = [names, ["---" if name in TEXTS else "---:" for name in names]]
    lines += [[_cell(name, row[name]) for name in names] for row in records_of(frame)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def leaderboard_table(frame: pd.DataFrame, width: int) -> Table:
    """Return a leaderboard for a terminal of some width, best agent first.

    Where not all columns fit, those that `--csv` is for are left out.
    """
    names = [str(name) for name in frame.columns]
    if width < WIDE:
        # The bounds say nothing more than clip_coef, unless it is a pair and no number.
        bounds = ("clip_coef",) if frame["clip_coef"].isna().any() else ("clip_low", "clip_high")
        names = [name for name in names if name not in (*LEFT_OUT, *bounds)]
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for name in names:
        table.add_column(name, justify="left" if name in TEXTS else "right", no_wrap=True)
    for row in records_of(frame):
        cells = [Text(_cell(name, row[name])) for name in names]
        table.add_row(*cells, style="bold green" if row["rank"] == 1 else None)
    return table


def result_line(summary: Mapping[str, Any]) -> str:
    """Return the comparison of base and best agent in one line."""
    base, best = summary["base"]["mean"], summary["best"]["mean"]
    return f"base {base:.2f} -> best {best:.2f} on the {summary.get('split', 'test')} split"


def family_tree(families: Sequence[FamilyMember], title: str) -> Tree:
    """Return the family tree of a run: one branch per member, bold where it lived to the end."""
    root = Tree(Text(title, style="bold"), guide_style="dim")
    # The last fitness of a member tells who is best, as on the leaderboard.
    living = [one for family in families for one in _everyone(family) if one.alive]
    best = max(living, key=lambda one: (_last(one), -one.agent), default=None)
    for family in families:
        _grow(root, family, None if best is None else best.id)
    return root


def _grow(branch: Tree, member: FamilyMember, best: int | None) -> None:
    style = "bold green" if member.id == best else "bold" if member.alive else ""
    label = Text(f"member {member.id}", style=style)
    # Rounds as in the records and in the names of files: the first is 0.
    last = member.born + len(member.fitness) - 1
    lived = f"round {last}" if last == member.born else f"rounds {member.born}-{last}"
    label.append(f"  agent {member.agent}, {lived}", style="dim")
    label.append(f"  {_course(member.fitness)}", style=style)
    if member.mutation.changes:
        label.append(f"  {changed(member.mutation.changes)}", style="yellow")
    elif member.parent is None:
        label.append(f"  lr {setting(member.hparams.lr)}", style="dim")
    if member.id == best:
        label.append("  best", style="bold green")
    below = branch.add(label)
    for child in member.children:
        _grow(below, child, best)


def _everyone(member: FamilyMember) -> Iterator[FamilyMember]:
    yield member
    for child in member.children:
        yield from _everyone(child)


def _last(member: FamilyMember) -> float:
    last = member.fitness[-1]
    return -math.inf if last is None else last


def _course(fitness: Sequence[float | None]) -> str:
    ends = [fitness[0], fitness[-1]] if len(fitness) > 1 else [fitness[0]]
    return " -> ".join("failed" if value is None else number(value) for value in ends)


def _plain(value: Any) -> Any:  # noqa: ANN401 -- whatever a frame holds
    # pandas has its own missing value, and its numbers are numpy's: neither is JSON.
    if value is None or type(value).__name__ == "NAType":
        return None
    plain = value.item() if hasattr(value, "item") else value
    return None if isinstance(plain, float) and math.isnan(plain) else plain


def _cell(name: str, value: Any) -> str:  # noqa: ANN401 -- whatever a frame holds
    if value is None:
        return "-"
    if name in ("fitness", "fitness_se"):
        return number(value)
    if name == "wall_seconds":
        return number(value, 1)
    if name == "tokens":
        return f"{value:,}"
    return setting(value) if isinstance(value, float) else str(value)
