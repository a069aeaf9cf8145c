"""Commands that train: run, resume."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evo_grpo.cli.commands.app import (
    Allow,
    Compare,
    Debug,
    File,
    Ranks,
    Run,
    Settings,
    app,
    refuse_folder,
)
from evo_grpo.cli.following import follow_run
from evo_grpo.cli.launching import follows, launch_ranks
from evo_grpo.cli.output import say, warn
from evo_grpo.errors import RunNotFoundError

if TYPE_CHECKING:
    from evo_grpo.terminal.progress import RunProgress

    Play = Callable[[RunProgress], Path]

PANEL = "Training"


@app.command(rich_help_panel=PANEL)
def run(
    file: File = Path("population.yaml"),
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Run folder; default: runs/<name>-<n>."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the run in the folder of --out.")
    ] = False,
    compare: Compare = False,
    nproc: Ranks = None,
    debug: Debug = False,
) -> None:
    """Train and evolve the population that a configuration describes."""
    from evo_grpo import settings as config

    refuse_folder(file)
    loaded = config.load(file, settings or ())
    launch_ranks(nproc, sys.argv[1:])
    for warning in () if follows() else config.warnings(loaded):
        warn(warning)
    if compare:
        from evo_grpo.settings.run import check_comparable

        check_comparable(loaded)

    def load() -> Play:
        from evo_grpo.training import run as run_population

        return lambda progress: run_population(loaded, out=out, force=force, observer=progress)

    follow_run(load, compare=compare)


def _finished(folder: Path) -> str:
    """Return that a run is finished, and by which rule."""
    from evo_grpo.record.stopping import why_it_ended
    from evo_grpo.record.summary import read_summary

    why = why_it_ended(read_summary(folder) or {})
    return f"this run is finished{why and f', {why}'}"


@app.command(rich_help_panel=PANEL)
def resume(
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
    nproc: Ranks = None,
    debug: Debug = False,
) -> None:
    """Continue an interrupted run to the same result, or a finished one with more rounds."""

    def load() -> Play:
        from evo_grpo.training import resume as resume_run

        def play(progress: RunProgress) -> Path:
            resumed = resume_run(folder, rounds=rounds, allow=allow or (), observer=progress)
            if not progress.began and not follows():
                say(
                    f"{folder}: {_finished(folder)}; to play more rounds: evo-grpo resume {folder} "
                    "--rounds N"
                )
            return resumed

        return play

    if folder.is_file() and folder.suffix in (".yaml", ".yml"):
        raise RunNotFoundError(
            f"{folder}: expected a run folder, got a file; start a run of this configuration with: "
            f"evo-grpo run {folder}"
        )
    launch_ranks(nproc, sys.argv[1:])
    follow_run(load, compare=compare, folder=folder, allow=allow or ())
