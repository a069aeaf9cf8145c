"""How far a finetune call is: a bar on a terminal, else a line per evaluation."""

from __future__ import annotations

from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from evo_grpo.terminal.console import say


@final
class Meter:
    """Shows a count and lines; use it in a `with` block.

    Args:
        total: What the count goes up to.
        unit: What is counted, in the plural.
        verbose: False shows nothing.
        console: Where to; None is standard output.
    """

    def __init__(
        self, total: int, unit: str, *, verbose: bool, console: Console | None = None
    ) -> None:
        self.total = total
        self.unit = unit
        self.done = 0
        self._console = console or Console(quiet=not verbose)
        self._bar: Progress | None = None
        if verbose and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=32),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(unit, total=total)

    def __enter__(self) -> Self:
        """Start drawing."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the terminal as it was; the bar stays where it came to."""
        if self._bar is not None:
            self._bar.stop()

    def add(self, count: int) -> None:
        """Move on by a count; beyond the total the bar is full."""
        self.done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=min(self.done, self.total))

    def line(self, text: str) -> None:
        """Write a line with the count in front; it stays above the bar."""
        width = len(str(self.total))
        say(self._console, f"{self.done:>{width}}/{self.total} {self.unit}  {text}")
