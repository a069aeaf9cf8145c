"""Commands that train: run, resume."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evo_grpo.cli.commands.app import (
    Allow,
    AsEvents,
    Code,
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
)
from evo_grpo.cli.launching import launch_ranks, reporting_early_errors
from evo_grpo.cli.output import say
from evo_grpo.cli.showing import Audience, show_run
from evo_grpo.errors import RunNotFoundError
from evo_grpo.population.ranks.team import is_silent_rank

if TYPE_CHECKING:
    from evo_grpo.readers.terminal.progress import RunProgress

PANEL = "Training"


def _check_report(report: bool) -> None:
    """Raise EngineUnavailable for --report without plotly."""
    if report and not is_silent_rank():
        from evo_grpo.readers.report.figures.axes import graph_objects

        graph_objects("run --report")


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
    """Train and evolve the population of a configuration."""
    from evo_grpo import settings as config
    from evo_grpo.places import looking_in
    from evo_grpo.record.folder import beside

    audience = Audience(quiet=quiet, as_json=as_json)
    with audience.errors(), reporting_early_errors(), looking_in(beside(file)):
        loaded = config.load(file, settings or ())
        _check_report(report)
        launch_ranks(nproc, sys.argv[1:])
        for warning in config.warnings(loaded):
            audience.warn(warning)
        if compare:
            from evo_grpo.settings.run import check_comparable

            check_comparable(loaded)

        def play(progress: RunProgress) -> Path:
            from evo_grpo.training.run import run as run_population

            return run_population(
                loaded, out=out, force=force, observer=audience.observer(progress), report=report
            )

        show_run(play, audience, loading=loaded.model.name, compare=compare, report=report)


def _finished(folder: Path) -> str:
    """Return a sentence that a run is finished, with the rule that ended it."""
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
            help="Number of rounds of the whole run, to extend it; more than were played.",
        ),
    ] = None,
    allow: Allow = None,
    code: Code = None,
    compare: Compare = False,
    report: Report = False,
    nproc: Ranks = None,
    quiet: Quiet = False,
    as_json: AsEvents = False,
    debug: Debug = False,
) -> None:
    """Continue an interrupted run with the same result, or extend a finished run by more rounds."""
    audience = Audience(quiet=quiet, as_json=as_json)

    def play(progress: RunProgress) -> Path:
        from evo_grpo.training.run import resume as resume_run

        resumed = resume_run(
            folder,
            rounds=rounds,
            allow=allow or (),
            observer=audience.observer(progress),
            report=report,
        )
        if not progress.began and audience.person:
            more = f"evo-grpo resume {folder} --rounds N"
            say(f"{folder}: {_finished(folder)}; to play more rounds: {more}")
        return resumed

    from evo_grpo.places import looking_in
    from evo_grpo.record.folder import code_folder, expect_run

    with audience.errors(), reporting_early_errors(), looking_in(code_folder(code), is_code=True):
        if folder.is_file() and folder.suffix in (".yaml", ".yml"):
            raise RunNotFoundError(
                f"{folder}: expected a run folder, got a file; start a run of this configuration "
                f"with: evo-grpo run {folder}"
            )
        if not is_silent_rank():  # the others may not see the folder
            expect_run(folder)
        _check_report(report)
        launch_ranks(nproc, sys.argv[1:])
        show_run(
            play,
            audience,
            loading=str(folder),
            compare=compare,
            folder=folder,
            allow=allow or (),
            report=report,
        )
