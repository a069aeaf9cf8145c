"""Commands that train: run, resume."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evo_grpo.cli.commands.app import (
    Allow,
    AsEvents,
    Compare,
    Debug,
    File,
    Out,
    Quiet,
    Ranks,
    Report,
    Run,
    Settings,
    app,
    refuse_folder,
)
from evo_grpo.cli.following import Audience, follow_run
from evo_grpo.cli.launching import follows, launch_ranks
from evo_grpo.cli.output import say
from evo_grpo.errors import RunNotFoundError

if TYPE_CHECKING:
    from evo_grpo.record.observer import Observer
    from evo_grpo.terminal.progress import RunProgress

    Play = Callable[[RunProgress], Path]

PANEL = "Training"


def with_report(progress: RunProgress, report: bool) -> Observer:
    """Return what follows a run: its progress and, where asked for, its page."""
    if not report or follows():
        return progress
    from evo_grpo.record.observer import Several
    from evo_grpo.report.live import LiveReport

    return Several((progress, LiveReport()))


@app.command(rich_help_panel=PANEL)
def run(  # noqa: PLR0913 -- one argument for each option
    file: File = Path("population.yaml"),
    settings: Settings = None,
    out: Out = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the run in the folder of --out.")
    ] = False,
    compare: Compare = False,
    report: Report = False,
    nproc: Ranks = None,
    quiet: Quiet = False,
    as_json: AsEvents = False,
    debug: Debug = False,
) -> None:
    """Train and evolve the population that a configuration describes."""
    from evo_grpo import settings as config

    audience = Audience(quiet=quiet, as_json=as_json)
    with audience.errors():
        refuse_folder(file)
        loaded = config.load(file, settings or ())
        launch_ranks(nproc, sys.argv[1:])
        for warning in config.warnings(loaded):
            audience.warn(warning)
        if compare:
            from evo_grpo.settings.run import check_comparable

            check_comparable(loaded)

        def load() -> Play:
            from evo_grpo.training import run as run_population

            return lambda progress: run_population(
                loaded, out=out, force=force, observer=with_report(progress, report)
            )

        follow_run(load, audience, loading=loaded.model.name, compare=compare, report=report)


def _finished(folder: Path) -> str:
    """Return that a run is finished, and by which rule."""
    from evo_grpo.record.stopping import why_it_ended
    from evo_grpo.record.summary import read_summary

    why = why_it_ended(read_summary(folder) or {})
    return f"this run is finished{why and f', {why}'}"


@app.command(rich_help_panel=PANEL)
def resume(  # noqa: PLR0913 -- one argument for each option
    folder: Run,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            min=1,
            help="Rounds of the whole run, more than were played; a finished run goes on with it.",
        ),
    ] = None,
    allow: Allow = None,
    compare: Compare = False,
    report: Report = False,
    nproc: Ranks = None,
    quiet: Quiet = False,
    as_json: AsEvents = False,
    debug: Debug = False,
) -> None:
    """Continue an interrupted run to the same result, or a finished one with more rounds."""
    audience = Audience(quiet=quiet, as_json=as_json)

    def load() -> Play:
        from evo_grpo.training import resume as resume_run

        def play(progress: RunProgress) -> Path:
            observer = with_report(progress, report)
            resumed = resume_run(folder, rounds=rounds, allow=allow or (), observer=observer)
            if not progress.began and audience.person:
                say(
                    f"{folder}: {_finished(folder)}; to play more rounds: evo-grpo resume {folder} "
                    "--rounds N"
                )
            return resumed

        return play

    from evo_grpo.record.folder import expect_run

    with audience.errors():
        if folder.is_file() and folder.suffix in (".yaml", ".yml"):
            raise RunNotFoundError(
                f"{folder}: expected a run folder, got a file; start a run of this configuration "
                f"with: evo-grpo run {folder}"
            )
        expect_run(folder)
        launch_ranks(nproc, sys.argv[1:])
        follow_run(
            load,
            audience,
            loading=str(folder),
            compare=compare,
            folder=folder,
            allow=allow or (),
            report=report,
        )
