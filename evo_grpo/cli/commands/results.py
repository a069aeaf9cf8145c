"""Commands that show the result of a run, and copy it to other places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evo_grpo.cli.commands.app import AsDocument, Debug, Run, app
from evo_grpo.cli.output import say, write
from evo_grpo.places import expanded

if TYPE_CHECKING:
    from evo_grpo.record.view import RunView

PANEL = "Looking at a run"


@app.command(rich_help_panel=PANEL)
def leaderboard(
    folder: Run,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    debug: Debug = False,
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
def lineage(folder: Run, as_json: AsDocument = False, debug: Debug = False) -> None:
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
    """Print the facts that a run does not have, and why."""
    if not view.rounds:
        say(f"{folder}: no round is finished yet")
        return
    for sentence in view.missing:
        say(sentence)


@app.command(rich_help_panel=PANEL)
def report(
    folder: Run,
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
    debug: Debug = False,
) -> None:
    """Write a page with figures of a run, finished or not, that needs no network."""
    from evo_grpo.readers.report.run_page import write_report

    written = write_report(folder, out, samples=samples)
    say(f"wrote {written}")
    if open_it:
        typer.launch(written.resolve().as_uri())


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
    debug: Debug = False,
) -> None:
    """Print runs side by side, with their differences from the first."""
    from evo_grpo.readers.report import side_by_side as page
    from evo_grpo.readers.terminal.console import plain_table, show, standard_output

    found = page.side_by_side(runs)
    console = standard_output()
    for table, texts in (
        (page.results_table(found), 1),
        (page.differences_table(found), 1),
        (page.settings_table(found), 1),
    ):
        shown = [[cell for cell, _ in row] for row in table.rows]
        show(console, plain_table(table.titles, shown, texts))
        say("")
    say(found.caveat)
    if out is not None:
        say(f"wrote {page.write_side_by_side(found, out)}")


@app.command(rich_help_panel=PANEL)
def verify(folder: Run, debug: Debug = False) -> None:
    """Check that every file of a run is as it was written."""
    from evo_grpo.analysis.verify import verify as look
    from evo_grpo.record.wording import count

    found = look(folder)
    for text in found.notes:
        say(f"note: {text}")
    for text in found.damage:
        say(f"damaged: {text}", err=True)
    looked = f"{folder}: {count(found.files, 'file')} of {count(found.rounds, 'round')}"
    if found.damage:
        say(f"{looked}, {len(found.damage)} damaged", err=True)
        raise typer.Exit(1)
    say(f"{looked}, all as they were written")


@app.command(rich_help_panel=PANEL)
def follow(
    folder: Run,
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
    debug: Debug = False,
) -> None:
    """Bring a run into trackers, a database or a report; of a run that trains, until it ends."""
    from evo_grpo.cli.readers import feed_readers

    names = [name.strip() for name in to.split(",")] if to else []
    feed_readers(folder, names, storage, outside=outside, quiet=quiet)


@app.command(rich_help_panel=PANEL)
def dashboard(
    folder: Run,
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=65535, help="On this machine; 0 takes a free one."),
    ] = 8080,
    debug: Debug = False,
) -> None:
    """Open optuna-dashboard on a run, with its family tree and a note for each trial."""
    from evo_grpo.readers.dashboard import serve

    serve(folder, port, say=lambda text: say(f"{folder}: {text}"))
