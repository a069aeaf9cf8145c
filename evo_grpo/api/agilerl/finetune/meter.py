"""Progress of a finetune call: a bar on a terminal, else a line per evaluation."""

from __future__ import annotations

from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from evo_grpo.readers.terminal.console import say


@final
class Meter:
    """Shows a count and lines; use it in a `with` block.

    `unit` is the name of the counted items, in the plural; a `console` of None is standard output.
    """

    def __init__(
        self, total: int, unit: str, *, verbose: bool, console: Console | None = None
    ) -> None:
        self.total = total
        self.unit = unit
        self.done = 0
        self._console = console or Console(quiet=not verbose)
        drawn = verbose and self._console.is_terminal and not self._console.is_dumb_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not drawn,
        )
        self._task = self._bar.add_task(unit, total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Restore the terminal; the bar keeps its last state."""
        if not self._bar.disable:  # older releases of rich end with an empty line anyway
            self._bar.stop()

    def add(self, count: int) -> None:
        """Advance the bar by a count; beyond the total it stays full."""
        self.done += count
        self._bar.update(self._task, completed=min(self.done, self.total))

    def line(self, text: str) -> None:
        """Write a line with the count in front; it stays above the bar."""
        width = len(str(self.total))
        say(self._console, f"{self.done:>{width}}/{self.total} {self.unit}  {text}")
