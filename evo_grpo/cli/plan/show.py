"""A plan for the terminal: colours, and texts folded to its width."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from evo_grpo.cli.plan import Plan
from evo_grpo.cli.plan.text import plan_rows


def show_plan(plan: Plan, source: str) -> RenderableType:
    """Return a plan as two columns, with its warnings below."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for title, text in plan_rows(plan):
        grid.add_row(Text(title), Text(text))
    parts: list[RenderableType] = [Text(f"{source} is valid.\n", style="bold"), grid]
    if plan.warnings:
        parts.append(Text())
    parts += [Text(f"warning: {text}", style="yellow") for text in plan.warnings]
    return Group(*parts)
