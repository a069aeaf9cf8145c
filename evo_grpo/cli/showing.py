"""Shows a run, while it trains and at its end, to a person or a program."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, final

import typer

from evo_grpo.cli.host_memory import keep_freed_memory
from evo_grpo.cli.output import say, warn
from evo_grpo.cli.stopping import interruptible
from evo_grpo.errors import EvoGrpoError
from evo_grpo.escaping import printable
from evo_grpo.population.ranks.team import is_silent_rank
from evo_grpo.record.names import REPORT
from evo_grpo.record.observer import Observer, ObserverList

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import Console

    from evo_grpo.readers.terminal.progress import RunProgress


@final
class RunOutput:
    """Selects the output of a run: text for a person, events for a program, or only errors.

    `quiet` prints only errors, and the run folder as the last line; `as_json` prints one event per
    line. Both together raise typer.BadParameter.
    """

    def __init__(self, *, quiet: bool = False, as_json: bool = False) -> None:
        from evo_grpo.cli.events import Events
        from evo_grpo.readers.terminal.console import standard_output

        if quiet and as_json:
            raise typer.BadParameter("expected one of --quiet and --json, got both")
        self.quiet = quiet
        self.events = Events() if as_json else None
        self.person = not (quiet or as_json or is_silent_rank())
        self.console: Console = standard_output()
        if not self.person:
            # Download progress bars are shown only to a person.
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    def errors(self) -> AbstractContextManager[None]:
        """Write an error in the body as an event, if events are written."""
        return nullcontext() if self.events is None else self.events.errors()

    def warn(self, text: str) -> None:
        """Write a warning; with several ranks, only the first writes."""
        if self.events is not None:
            self.events.write("warning", text=text)
        elif self.person:
            warn(text)

    def progress(self, *, arm: bool = False) -> RunProgress:
        """Return the progress of a run, or, with `arm`, of a population of a comparison."""
        from evo_grpo.readers.terminal.live import progress_on
        from evo_grpo.readers.terminal.progress import RunProgress

        return progress_on(self.console, limited=arm) if self.person else RunProgress()

    def observer(self, progress: RunProgress, *, arm: bool = False) -> Observer:
        """Return `progress` together with the events of the run, or of an arm."""
        from evo_grpo.cli.events import Events

        events = Observer() if self.events is None else Events(ends=True) if arm else self.events
        return ObserverList((progress, events))

    def loading(self, progress: RunProgress, what: str) -> None:
        """Show the name of the model or run that is loaded, as the first line."""
        progress.loading(what)
        if self.events is not None:
            self.events.write("loading", what=what)

    def stopped(self, text: str) -> None:
        """Write an event for a stopped run; a person gets a message on standard error instead."""
        if self.events is not None:
            self.events.write("stopped", text=text)


def show_run(
    play: Callable[[RunProgress], Path],
    audience: RunOutput,
    *,
    loading: str,
    compare: bool,
    folder: Path | None = None,
    allow: Sequence[str] = (),
    report: bool = False,
) -> None:
    """Show a run while it trains, then its result, or how to resume it after an interruption.

    `play` trains the run by `training.run`, which is imported before the call. `loading` is the
    name of the model or run folder, shown first. With `compare`, a comparison follows, which
    `report` adds to the HTML report. `folder` is the folder of a resumed run, whose files in
    `allow` may have changed.
    """
    from evo_grpo.readers.terminal.console import WorkLines, warnings_to

    option = " --compare" if compare else ""
    progress = audience.progress()
    progress.run_dir = folder

    def stopped() -> str:
        if is_silent_rank():
            return f"rank {os.environ['RANK']} stopped"
        how = progress.how_to_resume()
        return printable(how if progress.run_dir is None else how + option)

    audience.loading(progress, loading)
    working = WorkLines(audience.console) if audience.person else nullcontext()
    with interruptible(stopped) as begin, progress, working, warnings_to(audience.warn):
        import_module("evo_grpo.training.run")  # takes seconds; a signal still ends it at once
        keep_freed_memory()
        begin()
        try:
            finished = play(progress)
        except (EvoGrpoError, OSError) as error:
            if progress.began:
                error.add_note(
                    f"fix the cause, then continue with: evo-grpo resume {progress.run_dir}{option}"
                )
            raise
        except KeyboardInterrupt:
            audience.stopped(stopped())
            raise
    if is_silent_rank():
        return
    from evo_grpo.record.summary import read_summary

    if read_summary(finished) is None:  # stopped by `steer stop-after-round`
        audience.stopped(stopped())
        if audience.person:
            say(stopped())
        return
    _show_end(audience, finished, compare=compare, allow=allow, report=report)


def _show_end(
    audience: RunOutput, finished: Path, *, compare: bool, allow: Sequence[str], report: bool
) -> None:
    """Show the result of a finished run, its folder, and the next commands."""
    from evo_grpo.readers.follow import study_of
    from evo_grpo.readers.terminal.result import show_ending, show_next
    from evo_grpo.record.view import view_of

    view = view_of(finished)
    if audience.events is not None:
        audience.events.ended(finished, view)
    elif audience.person:
        show_ending(audience.console, view)
    if compare:
        _compare(audience, finished, allow)
        if report:
            from evo_grpo.readers.report.run_page import write_report

            write_report(finished)
    if report and audience.person:
        say(f"report: {finished / REPORT}")
    if audience.quiet:
        say(str(finished))
    if audience.person:
        show_next(audience.console, str(finished), study_of(finished), worse=bool(view.loss))


def _compare(audience: RunOutput, folder: Path, allow: Sequence[str]) -> None:
    """Train the populations of a comparison with a finished run, then show the results as bars."""
    from evo_grpo.readers.terminal.console import say as say_to
    from evo_grpo.readers.terminal.console import warnings_to
    from evo_grpo.readers.terminal.result import show_arms
    from evo_grpo.record.arms import comparison_arms
    from evo_grpo.record.names import COMPARISON
    from evo_grpo.record.story import guess_sentence

    remedy = f"continue with: evo-grpo resume {folder} --compare"
    stopped = printable(f"stopped in the comparison; {remedy}")
    if audience.person:
        say("")
        say("the same population without evolution, at equal tokens:")
    with interruptible(lambda: stopped) as begin:
        from evo_grpo.analysis.arms import compare

        begin()
        with audience.progress(arm=True) as progress, warnings_to(audience.warn):
            try:
                result = compare(
                    folder, allow=allow, observer=audience.observer(progress, arm=True)
                )
            except (EvoGrpoError, OSError) as error:
                error.add_note(f"fix the cause, then {remedy}")
                raise
            except KeyboardInterrupt:
                audience.stopped(stopped)
                raise
    if audience.events is not None:
        audience.events.write("comparison", **result)
    if audience.person:
        show_arms(audience.console, comparison_arms(result))
        say_to(audience.console, guess_sentence(result), "bold", wrap=True)
        say_to(audience.console, f"comparison: {folder / COMPARISON}")
