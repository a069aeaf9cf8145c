"""A table of strings on a screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from evo_grpo.terminal.console import safe


def plain_table(titles: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 0) -> Table:
    """Return a table of strings.

    Args:
        titles: The columns.
        rows: Their cells, strings from anywhere.
        texts: How many of the first columns are words, on the left; the others are numbers.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for i, title in enumerate(titles):
        table.add_column(safe(title), justify="left" if i < texts else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(safe, row))
    return table
