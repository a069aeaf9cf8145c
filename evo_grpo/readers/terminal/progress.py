"""Progress of a run: a live table in a terminal or notebook, plain lines in a pipe."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from rich.console import Console

from evo_grpo.readers.terminal.console import say, standard_output
from evo_grpo.readers.terminal.live import LiveTable
from evo_grpo.readers.terminal.plain import PlainLines
from evo_grpo.readers.terminal.result import show_ending, show_next
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.view import RunView
from evo_grpo.record.wording import count
from evo_grpo.settings import PopulationConfig, RunConfig
from evo_grpo.types import Slot


@final
class RunProgress(Observer):
    """Shows a run, and keeps its progress for messages about errors; a context manager.

    Args:
        view: The display; None shows nothing.
        title: The first line: the model, the task and the size of the run. A run that starts from
            a RunConfig needs neither it nor `hyperparameters`.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the terminal, also after an error."""
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
            on = f"{settings.model.name} on {settings.env.kind}"
            title = f"{on}, {describe(settings.population, limited=self.limited)}"
            hyperparameters = tuple(settings.search_space().names())
        if self.view is not None:
            first = title if run_dir is None else f"{run_dir}: {title}"
            if first_round:
                first += f", going on after round {first_round}"
            self.view.start(first, rounds, first_round, hyperparameters)

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
        done = self.rounds_done
        when = f"after round {done}" if done else "before the first round was finished"
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
    seen = anywhere or console.is_terminal or console.is_jupyter
    view = view_for(console) if seen else None
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
