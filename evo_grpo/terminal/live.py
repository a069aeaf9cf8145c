"""Progress as a display that redraws itself: a bar of rounds and a table of agents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.terminal.formatting import (
    TITLES,
    best_of,
    direction,
    evolution_line,
    hyperparameter,
    number,
    round_line,
    shown_names,
)

MUTATED = "bold yellow"
WIDE = 100
"""Columns from which on the table has room for standard errors."""
ARROWS = {"up": " ↑", "down": " ↓"}


@final
class LiveTable:
    """A bar and the agents of the last finished round, redrawn; a line per round scrolls above.

    Args:
        console: A terminal, or a notebook with ipywidgets.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.rounds = 0
        self.names: list[str] = []
        self.last: RoundRecord | None = None
        self.bar = Progress(
            SpinnerColumn(style="cyan"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=32, complete_style="cyan", finished_style="green"),
            TextColumn("{task.fields[stage]}", style="dim"),
            TimeElapsedColumn(),
            console=console,
        )
        self.task = self.bar.add_task("", total=1, stage="")
        self.live = Live(console=console, get_renderable=self.render, refresh_per_second=8)

    def start(
        self, title: str, rounds: int, first_round: int, hyperparameters: Sequence[str]
    ) -> None:
        """Print the title and start drawing.

        Args:
            title: First line of the run.
            rounds: Rounds of the whole run, >= 1.
            first_round: The 0-based round that begins.
            hyperparameters: Names to show beside the common ones.
        """
        self.rounds = rounds
        self.names = shown_names(hyperparameters)
        self._line(Text(title, style="bold"))
        self.bar.update(
            self.task,
            total=rounds,
            completed=first_round,
            description=self._title(first_round),
        )
        self.live.start()

    def stage(self, round: int, name: str, done: int, total: int) -> None:
        """Show the stage of the round; see `Observer`."""
        text = f"{name} {done}/{total}" if total > 1 else name
        self.bar.update(self.task, description=self._title(round), stage=text)

    def round_done(self, record: RoundRecord) -> None:
        """Advance the bar, fill the table, and print the line of the round above."""
        self.last = record
        self.bar.update(
            self.task,
            completed=record.round + 1,
            description=self._title(min(record.round + 1, self.rounds - 1)),
            stage="",
        )
        self._line(Text(round_line(record, self.rounds)))
        if evolution := evolution_line(record):
            self._line(Text(f"  {evolution}", style="dim"))

    def close(self) -> None:
        """Stop drawing and restore the terminal: the table disappears, the lines above stay."""
        if self.live.is_started:
            self.live.transient = True
            self.live.stop()

    def render(self) -> RenderableType:
        """Return the current display."""
        return Group(self.bar) if self.last is None else Group(self._table(self.last), self.bar)

    def _title(self, round: int) -> str:
        return f"round {round + 1}/{self.rounds}"

    def _table(self, record: RoundRecord) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
        for title in ("agent", "member", "fitness", "reward", "KL", "zero-var"):
            table.add_column(title, justify="right", no_wrap=True)
        for name in self.names:
            table.add_column(TITLES.get(name, name), justify="right", no_wrap=True)
        best = best_of(record.agents)
        for agent in record.agents:
            style = "bold green" if best is not None and agent.agent == best.agent else None
            table.add_row(*self._cells(agent), style="red" if agent.score is None else style)
        return table

    def _cells(self, agent: AgentRecord) -> list[Text]:
        score = agent.score
        fitness = "failed" if score is None else number(score.mean)
        if score is not None and self.console.width >= WIDE:
            fitness += f" ±{number(score.se)}"
        metrics = agent.metrics
        cells = [
            Text(str(agent.agent)),
            Text(str(agent.member)),
            Text(fitness),
            Text(number(metrics.get("reward"))),
            Text(number(metrics.get("kl"), 4)),
            Text(number(metrics.get("zero_variance"), 2)),
        ]
        for name in self.names:
            moved = direction(agent.mutation.changes, name)
            text = hyperparameter(agent.hparams, name) + ARROWS.get(moved, "")
            cells.append(Text(text, style=MUTATED if moved else ""))
        return cells

    def _line(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True)
