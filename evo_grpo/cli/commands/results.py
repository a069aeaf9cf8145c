"""Defines the commands that show the result of a run, or copy it to other places."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from evo_grpo.cli.commands import options
from evo_grpo.cli.commands.options import app
from evo_grpo.cli.output import say, write
from evo_grpo.errors import EvoGrpoError
from evo_grpo.escaping import printable, shorten
from evo_grpo.places import expanded

if TYPE_CHECKING:
    from evo_grpo.record.view import RunView

PANEL = "Looking at a run"
LONGEST = 1000
"""Most characters of a line that `follow` prints."""
READER = "reader-"
"""Start of the names of reader threads."""


@app.command(rich_help_panel=PANEL)
def leaderboard(
    folder: options.Run,
    as_json: options.AsDocument = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    debug: options.Debug = False,
) -> None:
    """Print the agents of a run, the winner first."""
    from evo_grpo.readers.terminal import result
    from evo_grpo.readers.terminal.console import standard_output
    from evo_grpo.record.leaderboard import from_records
    from evo_grpo.record.view import view_of

    if as_json + as_csv + as_markdown > 1:
        raise typer.BadParameter("expected one of --json, --csv and --markdown, got several")
    view = view_of(folder)
    if as_json:
        write(json.dumps(view.leaderboard, indent=2) + "\n")
        return
    if as_csv or as_markdown:
        frame = from_records(view.rounds, view.summary)
        text = frame.to_csv(index=False)
        write(
            text
            if as_csv
            else result.leaderboard_markdown([*map(str, frame)], view.leaderboard) + "\n"
        )
        return
    if view.rounds:
        result.show_leaderboard(standard_output(), view)
    _say_missing(view, folder)


@app.command(rich_help_panel=PANEL)
def lineage(
    folder: options.Run, as_json: options.AsDocument = False, debug: options.Debug = False
) -> None:
    """Print the family tree of a run, with mutations."""
    from evo_grpo.readers.terminal.console import show, standard_output
    from evo_grpo.readers.terminal.result import family_tree
    from evo_grpo.record.view import view_of

    view = view_of(folder)
    if as_json:
        write(json.dumps({"run": str(folder), **view.family_document()}, indent=2) + "\n")
        return
    if view.rounds:
        show(standard_output(), family_tree(view))
    _say_missing(view, folder)


def _say_missing(view: RunView, folder: Path) -> None:
    """Print which facts the records of a run lack, and why."""
    if not view.rounds:
        say(f"{folder}: no round is finished yet")
        return
    for sentence in view.missing:
        say(sentence)


@app.command(rich_help_panel=PANEL)
def report(
    folder: options.Run,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            parser=expanded,
            help="Default: report.html in the run folder.",
        ),
    ] = None,
    samples: Annotated[
        bool,
        typer.Option(
            "--samples/--no-samples", help="Show prompts, answers and completions: your data."
        ),
    ] = True,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    debug: options.Debug = False,
) -> None:
    """Write a page with figures of a run, finished or not, that needs no network."""
    from evo_grpo.readers.report.run_page import write_report

    page = write_report(folder, out, samples=samples)
    say(f"wrote {page}")
    if open_it:
        typer.launch(page.resolve().as_uri())


@app.command(rich_help_panel=PANEL)
def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="Run folders, two or more.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", parser=expanded, help="Write a page with figures too."
        ),
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Print runs side by side, with their differences from the first."""
    from evo_grpo.readers.report import compared_runs as page
    from evo_grpo.readers.terminal.console import plain_table, show, standard_output

    comparison = page.compare_runs(runs)
    console = standard_output()
    for make_table in (page.results_table, page.differences_table, page.settings_table):
        table = make_table(comparison)
        cells = [[cell for cell, _ in row] for row in table.rows]
        show(console, plain_table(table.titles, cells, 1))
        say("")
    say(comparison.caveat)
    if out is not None:
        say(f"wrote {page.write_compared_runs(comparison, out)}")


@app.command(rich_help_panel=PANEL)
def verify(folder: options.Run, debug: options.Debug = False) -> None:
    """Check that every file of a run is as it was written."""
    from evo_grpo.analysis.verify import verify as look
    from evo_grpo.record.wording import count

    result = look(folder)
    for text in result.notes:
        say(f"note: {text}")
    for text in result.damage:
        say(f"damaged: {text}", err=True)
    files = f"{folder}: {count(result.files, 'file')} of {count(result.rounds, 'round')}"
    if result.damage:
        say(f"{files}, {len(result.damage)} damaged", err=True)
        raise typer.Exit(1)
    say(f"{files}, all as they were written")


@app.command(rich_help_panel=PANEL)
def follow(
    folder: options.Run,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="NAMES",
            help="Readers, separated by commas: optuna, report, or kinds of trackers, such as "
            "wandb. Default: those of the run's settings.",
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            metavar="URL",
            help="Another database for optuna than that of the run's settings; without a password.",
        ),
    ] = None,
    outside: Annotated[
        bool,
        typer.Option(
            "--outside",
            help="Also write to folders, servers and databases outside of the run folder that the "
            "run's settings name.",
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only what goes wrong.")
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Write a run to trackers, a database or a report, and follow it while it trains."""
    names = [name.strip() for name in to.split(",")] if to else []
    _feed_readers(folder, names, storage, outside=outside, quiet=quiet)


def _feed_readers(
    folder: Path, to: Sequence[str], storage: str | None, *, outside: bool, quiet: bool
) -> None:
    """Feed the readers `to`, by default those of the run's settings, and print their progress."""
    output = _own_output()
    print_line = _line_printer(output)
    failed: list[EvoGrpoError] = []

    from evo_grpo.readers.follow import follow_all
    from evo_grpo.record.wording import count

    try:
        readers = follow_all(folder, to, storage=storage, outside=outside, warn=print_line)
        failed = [reader.error for reader in readers if reader.error is not None]
        for reader in () if quiet else readers:
            if reader.error is None:
                where = f", as {reader.id}" if reader.id else ""
                rounds = count(reader.rounds, "round")
                print_line(f"{reader.run}: {reader.name} has {rounds}{where}")
        for error in failed[1:]:
            print_line(str(error))
        if failed:
            raise failed[0]
    except EvoGrpoError as error:
        if not quiet:
            raise
        print_line(str(error))
        raise typer.Exit(error.exit_code) from None
    finally:
        # A run waits for the end of this output; see `training/followers.py`.
        if output is not sys.stdout:
            with suppress(OSError):
                output.close()
        if failed:
            _exit_if_hanging(failed[0], quiet=quiet)


def _line_printer(output: TextIO) -> Callable[[str], None]:
    """Return a function that prints each line only once; any thread may call it."""
    printed: set[str] = set()

    def print_line(text: str) -> None:
        if text in printed:
            return
        printed.add(text)
        with suppress(OSError):  # the run that reads the output may have ended
            output.write(printable(shorten(" ".join(text.split()), LONGEST)) + "\n")
            output.flush()

    return print_line


def _exit_if_hanging(error: EvoGrpoError, *, quiet: bool) -> None:
    """Exit at once if a reader hangs, because the exit handlers of its package would hang too."""
    if any(thread.name.startswith(READER) for thread in threading.enumerate()):
        if not quiet:
            say(f"error: {error}", err=True)
        os._exit(error.exit_code)


def _own_output() -> TextIO:
    """Return a copy of standard output; later prints of packages then go to standard error."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:  # sys.stdout was replaced by an object without a descriptor
        return sys.stdout
    output = os.fdopen(os.dup(descriptor), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, descriptor)
    return output


@app.command(rich_help_panel=PANEL)
def dashboard(
    folder: options.Run,
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=65535, help="On this machine; 0 takes a free one."),
    ] = 8080,
    debug: options.Debug = False,
) -> None:
    """Open optuna-dashboard on a run, with its family tree and a note for each trial."""
    from evo_grpo.readers.dashboard import serve

    serve(folder, port, say=lambda text: say(f"{folder}: {text}"))
