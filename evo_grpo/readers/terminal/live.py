"""Shows the progress of a run as a redrawn table, and chooses the form for each console."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, final

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.segment import SegmentLines
from rich.table import Column, Table
from rich.text import Text

from evo_grpo.readers.terminal.console import (
    BAD,
    GOOD,
    NOTICE,
    new_table,
    safe,
    say,
    show,
    standard_output,
)
from evo_grpo.readers.terminal.progress import (
    Pace,
    PlainLines,
    RunProgress,
    clock,
    direction,
    evolution,
    round_line,
)
from evo_grpo.record.family import best_agent, order
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.wording import count, hyperparameter, number
from evo_grpo.schema.problems import short_name

MUTATED = f"bold {NOTICE}"
STANDARD_ERROR = "±"
OPTIONAL = (STANDARD_ERROR, "zero-var", "KL", "reward", "member")
"""Columns that a narrow terminal leaves out, in the order in which they are left out."""
LEAST_BAR, MOST_BAR = 6, 32
BESIDE_BAR = 66
"""Greatest width of the text beside the bar, in columns; both fit in a line of 80 columns."""
BESIDE_ROWS = 3
"""Lines of a terminal that the table's rows cannot use: its header, the bar, and a free line."""
UNLIMITED = 10_000
"""Width to measure a table in, greater than that of any table."""
ARROWS = {"up": " ↑", "down": " ↓"}


@final
class PaceColumn(ProgressColumn):
    """A column of the bar with the elapsed time, the estimated remaining time and the speed."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(Column(no_wrap=True))
        self.pace = pace

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        left, speed = self.pace.left(), self.pace.tokens_per_second
        text = f"{clock(task.elapsed or 0)} ETA {'-' if left is None else clock(left)}"
        return safe(text if speed is None else f"{text} {speed:,.0f} tok/s")


@final
class LiveTable(RunProgress):
    """A bar and a table of the last round, redrawn in a terminal or a notebook with ipywidgets."""

    def __init__(self, console: Console, **options: Any) -> None:
        super().__init__(console, **options)
        self.last: RoundRecord | None = None
        # Round, size of the terminal, table.
        self.drawn: tuple[int, ConsoleDimensions, RenderableType] | None = None
        self.line = BarColumn(complete_style=GOOD, finished_style=GOOD)
        self.bar = Progress(
            SpinnerColumn(style=GOOD),
            TextColumn("{task.description}", markup=False),
            self.line,
            TextColumn("{task.fields[stage]}", markup=False),
            PaceColumn(self.pace),
            console=console,
        )
        self.task = self.bar.add_task("", total=1, stage="")
        self.live = self._fresh()

    def _fresh(self) -> Live:
        return Live(console=self.console, get_renderable=self.render, refresh_per_second=8)

    def begin(self, heading: str) -> None:
        """Print the heading and start drawing, with an empty table."""
        self.last = self.drawn = None
        say(self.console, heading, "bold", wrap=True)
        self.bar.reset(self.task, total=self.rounds, completed=self.rounds_done)
        self._show(self.rounds_done)
        self.live.start()

    def _show(self, round: int, stage: str = "", done: int | None = None) -> None:
        """Show a round and its stage beside the bar; if `done` is set, advance the bar to it."""
        title = f"round {min(round + 1, self.rounds)}/{self.rounds}"
        self.bar.update(self.task, description=title, stage=stage, completed=done)

    def stage(self, round: int, name: str, done: int, total: int) -> None:
        """Show a stage of the round beside the bar."""
        super().stage(round, name, done, total)
        self._show(round, f"{name} {done}/{total}" if total > 1 else name)

    def round_done(self, record: RoundRecord) -> None:
        """Advance the bar, fill the table, and print the result and the decisions of the round."""
        super().round_done(record)
        self.last = record
        self._show(record.round + 1, done=record.round + 1)
        lines: list[RenderableType] = [
            safe(round_line(record, self.rounds)),
            *(Padding(safe(d.sentence, "dim"), (0, 0, 0, 2)) for d in record.decisions),
        ]
        changes = Table.grid(padding=(0, 1))
        for name, details in evolution(record, "→").items():
            changes.add_row(safe(f"  {name}", "dim"), safe(details, "dim"))
        if changes.rows:
            lines.append(changes)
        # All in one call: each call draws the display again.
        show(self.console, Group(*lines))

    def close(self) -> None:
        """Stop drawing and restore the terminal: the table disappears, the lines above stay."""
        if self.live.is_started:
            self.live.transient = True
            self.live.stop()
            # A display that is started again overwrites lines that were printed since.
            self.live = self._fresh()

    def render(self) -> RenderableType:
        """Return what is drawn: the table of the last round, if any, and the bar."""
        self.line.bar_width = min(MOST_BAR, max(LEAST_BAR, self.console.width - BESIDE_BAR))
        return Group(self.bar) if self.last is None else Group(self._table(self.last), self.bar)

    def _table(self, record: RoundRecord) -> RenderableType:
        """Return a table of the agents of a round, with the rows and columns that have room."""
        size = self.console.size
        if self.drawn is None or self.drawn[:2] != (record.round, size):
            table = self._fitting_table(record, size)
            # Render the lines once: the display is drawn 8 times a second.
            lines = self.console.render_lines(table, pad=False)
            self.drawn = (record.round, size, SegmentLines(lines, new_lines=True))
        return self.drawn[2]

    def _fitting_table(self, record: RoundRecord, size: ConsoleDimensions) -> RenderableType:
        agents, room = record.agents, size.height - BESIDE_ROWS
        if len(agents) > room and not self.console.is_jupyter:  # a notebook scrolls
            agents = sorted(agents, key=order)[: max(1, room - 1)]
        unlimited = self.console.options.update_width(UNLIMITED)
        table = self._table_without(record, agents, OPTIONAL)
        for hidden in range(len(OPTIONAL)):
            wider = self._table_without(record, agents, OPTIONAL[:hidden])
            if self.console.measure(wider, options=unlimited).maximum <= size.width:
                table = wider
                break
        if not (missing := len(record.agents) - len(agents)):
            return table
        remark = safe(f"and {count(missing, 'more agent')}", "dim")
        remark.no_wrap = True
        return Group(table, remark)

    def _table_without(
        self, record: RoundRecord, agents: Sequence[AgentRecord], hidden: Sequence[str]
    ) -> Table:
        best = best_agent(record)
        rows = [self._cells(agent, STANDARD_ERROR not in hidden) for agent in agents]
        titles = [title for title in rows[0] if title not in hidden]
        table = new_table()
        for title in titles:
            table.add_column(title, justify="right", no_wrap=True)
        for agent, cells in zip(agents, rows, strict=True):
            style = f"bold {GOOD}" if best is not None and agent.agent == best.agent else None
            style = BAD if agent.score is None else style
            table.add_row(*(cells[title] for title in titles), style=style)
        return table

    def _cells(self, agent: AgentRecord, with_error: bool) -> dict[str, Text]:
        score = agent.score
        fitness = "failed" if score is None else number(score.mean)
        if score is not None and score.steps:  # a reward of training, no fitness
            fitness = "-"
        elif score is not None and with_error:
            fitness += f" ±{number(score.se)}"
        cells = {
            "agent": safe(str(agent.agent)),
            "member": safe(str(agent.member)),
            "fitness": safe(fitness),
            "reward": safe(number(agent.metrics.get("reward"))),
            "KL": safe(number(agent.metrics.get("kl"), 4)),
            "zero-var": safe(number(agent.metrics.get("zero_variance"), 2)),
        }
        for name in self.names:
            change = direction(agent.mutation.changes, name)
            value = hyperparameter(agent.hparams, name) + ARROWS.get(change, "")
            cells[short_name(name)] = safe(value, MUTATED if change else "")
        return cells


def progress(
    *,
    title: str = "",
    hyperparameters: Sequence[str] = (),
    anywhere: bool = False,
) -> RunProgress:
    """Return an observer that shows the progress of a call in Python.

    Progress is shown in a terminal or a notebook, and with `anywhere` also in a pipe or a file. For
    the other arguments, see `RunProgress`.
    """
    console = standard_output()
    is_shown = anywhere or console.is_terminal or console.is_jupyter
    # The first of several processes shows the run for all.
    if not is_shown or os.environ.get("RANK", "0") != "0":
        return RunProgress()
    return progress_on(console, title=title, hyperparameters=hyperparameters)


def progress_on(console: Console, **options: Any) -> RunProgress:
    """Return a `LiveTable` if the console can redraw (notebooks: with ipywidgets), or `PlainLines`.

    `options` are those of `RunProgress`.
    """
    if console.is_jupyter and find_spec("ipywidgets") is None:
        return PlainLines(Console(highlight=False, force_jupyter=False), **options)
    redraws = console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal)
    return LiveTable(console, **options) if redraws else PlainLines(console, **options)
