"""Shows the progress of a run: a redrawn table in a terminal or notebook, lines in a pipe."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, final

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
from evo_grpo.readers.terminal.plain import (
    Pace,
    PlainLines,
    clock,
    direction,
    evolution,
    round_line,
    shown_names,
)
from evo_grpo.readers.terminal.result import show_ending, show_next
from evo_grpo.record.family import best_agent, order
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.view import RunView
from evo_grpo.record.wording import count, hyperparameter, number
from evo_grpo.schema.problems import short_name
from evo_grpo.settings import PopulationConfig, RunConfig
from evo_grpo.types import Slot

MUTATED = f"bold {NOTICE}"
STANDARD_ERROR = "±"
OPTIONAL = (STANDARD_ERROR, "zero-var", "KL", "reward", "member")
"""Columns that a narrow terminal leaves out, in the order in which they are left out."""
LEAST_BAR, MOST_BAR = 6, 32
BESIDE_BAR = 66
"""Greatest width of the text beside the bar: 80 columns hold both in one line."""
BESIDE_ROWS = 3
"""Lines of a terminal that the header and the bar take, and one that stays free."""
UNLIMITED = 10_000
"""Width to measure a table in, greater than that of any table."""
ARROWS = {"up": " ↑", "down": " ↓"}


@final
class PaceColumn(ProgressColumn):
    """A column with the elapsed time, the estimated remaining time and the speed."""

    def __init__(self, view: LiveTable) -> None:
        super().__init__(Column(no_wrap=True))
        self.view = view

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        left, speed = self.view.pace.left(), self.view.pace.tokens_per_second
        text = f"{clock(task.elapsed or 0)} ETA {'-' if left is None else clock(left)}"
        return safe(text if speed is None else f"{text} {speed:,.0f} tok/s")


@final
class LiveTable:
    """A bar and a table of the last round, redrawn in a terminal or a notebook with ipywidgets."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.rounds = 0
        self.names: list[str] = []
        self.last: RoundRecord | None = None
        # Round, size of the terminal, table.
        self.drawn: tuple[int, ConsoleDimensions, RenderableType] | None = None
        self.line = BarColumn(complete_style=GOOD, finished_style=GOOD)
        self.pace = Pace()
        self.bar = Progress(
            SpinnerColumn(style=GOOD),
            TextColumn("{task.description}", markup=False),
            self.line,
            TextColumn("{task.fields[stage]}", markup=False),
            PaceColumn(self),
            console=console,
        )
        self.task = self.bar.add_task("", total=1, stage="")
        self.live = self._fresh()

    def _fresh(self) -> Live:
        return Live(console=self.console, get_renderable=self.render, refresh_per_second=8)

    def start(
        self, title: str, rounds: int, first_round: int, hyperparameters: Sequence[str]
    ) -> None:
        """Print the title and start drawing at the 0-based `first_round`, with an empty table."""
        self.rounds, self.names = rounds, shown_names(hyperparameters)
        self.last = self.drawn = None
        self.pace.start(rounds, first_round)
        say(self.console, title, "bold", wrap=True)
        self.bar.reset(self.task, total=rounds, completed=first_round)
        self._show(first_round)
        self.live.start()

    def _show(self, round: int, stage: str = "", done: int | None = None) -> None:
        """Show the round beside the bar, and its stage."""
        title = f"round {min(round + 1, self.rounds)}/{self.rounds}"
        self.bar.update(self.task, description=title, stage=stage, completed=done)

    def stage(self, round: int, name: str, done: int, total: int) -> None:
        """Show the stage of the round."""
        self.pace.stage(name, done, total)
        self._show(round, f"{name} {done}/{total}" if total > 1 else name)

    def step_done(self, round: int, step: int, metrics: Mapping[Slot, Mapping[str, float]]) -> None:
        """Update the speed and the time left."""
        del round, step
        self.pace.step_done(metrics)

    def round_done(self, record: RoundRecord) -> None:
        """Advance the bar, fill the table, and print the result and the decisions of the round."""
        self.last = record
        self.pace.round_done(record)
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
        """Return the current display."""
        self.line.bar_width = min(MOST_BAR, max(LEAST_BAR, self.console.width - BESIDE_BAR))
        return Group(self.bar) if self.last is None else Group(self._table(self.last), self.bar)

    def _table(self, record: RoundRecord) -> RenderableType:
        """Return the agents of a round, with as many rows and columns as fit the terminal."""
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


@final
class RunProgress(Observer):
    """A context manager that shows a run, and keeps its progress for messages about errors.

    Args:
        view: The display; None shows nothing.
        title: The first line: the model, the task and the size of the run. A run that starts from
            a RunConfig needs neither title nor `hyperparameters`.
        hyperparameters: Hyperparameters to show beside lr, beta, clip_coef and group_size.
        limited: Whether a round may end before all its steps.

    Attributes:
        run_dir: The run folder, None before the run has one.
        rounds_done: Finished rounds, including those before a resume.
        began: Whether the run began, so that it can be resumed.
    """

    def __init__(
        self,
        view: LiveTable | PlainLines | None,
        *,
        title: str = "",
        hyperparameters: Sequence[str] = (),
        limited: bool = False,
    ) -> None:
        self.view = view
        self.title = title
        self.limited = limited
        self.hyperparameters = tuple(hyperparameters)
        self.run_dir: Path | None = None
        self.rounds_done = 0
        self.began = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the terminal, even after an error."""
        self.close()

    def loading(self, what: str) -> None:
        """Show the name of the model or run that is loaded, as the first line."""
        if self.view is not None:
            say(self.view.console, f"loading {what} …", wrap=True)

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """See `Observer`."""
        self.run_dir = run_dir
        self.rounds_done = first_round
        self.began = True
        title, hyperparameters = self.title, self.hyperparameters
        if isinstance(settings, RunConfig):
            model_on_task = f"{settings.model.name} on {settings.env.kind}"
            title = f"{model_on_task}, {describe(settings.population, limited=self.limited)}"
            hyperparameters = tuple(settings.search_space().names())
        if self.view is not None:
            heading = title if run_dir is None else f"{run_dir}: {title}"
            if first_round:
                heading += f", going on after round {first_round}"
            self.view.start(heading, rounds, first_round, hyperparameters)

    def stage(self, round: int, name: str, done: int, total: int) -> None:
        """See `Observer`."""
        if self.view is not None:
            self.view.stage(round, name, done, total)

    def step_done(self, round: int, step: int, metrics: Mapping[Slot, Mapping[str, float]]) -> None:
        """See `Observer`."""
        if self.view is not None:
            self.view.step_done(round, step, metrics)

    def round_done(self, record: RoundRecord) -> None:
        """See `Observer`."""
        self.rounds_done = record.round + 1
        if self.view is not None:
            self.view.round_done(record)

    def note(self, text: str) -> None:
        """See `Observer`."""
        if self.view is not None:
            say(self.view.console, text, wrap=True)

    def finished(self, summary: Mapping[str, Any]) -> None:
        """See `Observer`."""
        self.close()

    def close(self) -> None:
        """Stop drawing and restore the terminal; calling it again does nothing."""
        if self.view is not None:
            self.view.close()

    def show_ending(self, run: RunView) -> None:
        """Show the leaderboard and the story of a run with finished rounds."""
        self.close()
        if self.view is not None and run.rounds:
            show_ending(self.view.console, run)
            if self.run_dir is not None:
                show_next(self.view.console, str(self.run_dir), worse=bool(run.loss))

    def how_to_resume(self) -> str:
        """Return the progress of an interrupted run, and the command that continues it."""
        if self.run_dir is None:
            return "stopped before the run began"
        if not self.began:
            return f"stopped before the run went on; continue with: evo-grpo resume {self.run_dir}"
        rounds = self.rounds_done
        when = f"after round {rounds}" if rounds else "before the first round was finished"
        return f"stopped {when}; continue with: evo-grpo resume {self.run_dir}"


def progress(
    *,
    title: str = "",
    hyperparameters: Sequence[str] = (),
    anywhere: bool = False,
) -> RunProgress:
    """Return the progress of a call in Python, shown in a terminal or a notebook.

    A pipe or a file shows it only with `anywhere`. For the other arguments, see `RunProgress`.
    """
    console = standard_output()
    if os.environ.get("RANK", "0") != "0":  # the first of several processes shows it for all
        return RunProgress(None)
    is_shown = anywhere or console.is_terminal or console.is_jupyter
    view = view_for(console) if is_shown else None
    return RunProgress(view, title=title, hyperparameters=hyperparameters)


def view_for(console: Console) -> LiveTable | PlainLines:
    """Return a live table if the console can redraw (notebooks: with ipywidgets), else lines."""
    if console.is_jupyter:
        if find_spec("ipywidgets") is not None:
            return LiveTable(console)
        return PlainLines(Console(highlight=False, force_jupyter=False))
    redraws = console.is_terminal and not console.is_dumb_terminal
    return LiveTable(console) if redraws else PlainLines(console)


def describe(population: PopulationConfig, *, limited: bool = False) -> str:
    """Return the size of a run; `limited` says whether a round may end before all its steps."""
    bound = "at most " if limited else ""
    return (
        f"{count(population.size, 'agent')}, {count(population.rounds, 'round')} of {bound}"
        f"{count(population.steps_per_round, 'step')}"
    )
