"""The commands of `evo-grpo`, as typer reads them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from evo_grpo.cli.failures import STOPPED, told
from evo_grpo.errors import ConfigError, EvoGrpoError

if TYPE_CHECKING:
    from rich.console import Console

    from evo_grpo.cli.terminal import RunProgress

DEBUG = "evo_grpo.debug"


class Commands(TyperGroup):
    """Turns errors into one message and an exit code; a traceback appears with --debug only."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 -- typer keeps the type of ctx to itself
        """Run a command; see the class docstring."""
        with told(lambda: ctx.meta.get(DEBUG, False)):
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    help="Evolve a population of GRPO agents over one shared language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _remember_debug(ctx: typer.Context, value: bool) -> bool:
    if value:
        ctx.meta[DEBUG] = True
    return value


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("evo-grpo")
        except PackageNotFoundError:  # run from the sources, as `python -m evo_grpo`
            found = "(not installed)"
        typer.echo(f"evo-grpo {found}")
        raise typer.Exit


Debug = Annotated[
    bool,
    typer.Option(
        "--debug", help="Show the traceback of an error.", callback=_remember_debug, is_eager=True
    ),
]
File = Annotated[Path, typer.Argument(metavar="CONFIG", help="A population.yaml.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B.C=VALUE",
        help="Replace a setting, the value in YAML; may be repeated.",
    ),
]


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
    debug: Debug = False,
) -> None:
    """Take the options that stand before a command."""


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("population.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file.")] = False,
    debug: Debug = False,
) -> None:
    """Write a commented population.yaml to begin with."""
    from evo_grpo import settings as config

    if path.is_dir():
        raise ConfigError(f"{path}: expected the name of a file to write, got a folder")
    if path.exists() and not force:
        raise ConfigError(
            f"{path}: exists already; choose another name, or replace it with --force"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}; make it first")
    path.write_text(config.template(), encoding="utf-8")
    typer.echo(f"wrote {path}; next: evo-grpo check {path}, then evo-grpo run {path}")


@app.command()
def check(
    file: File = Path("population.yaml"), settings: Settings = None, debug: Debug = False
) -> None:
    """Validate a configuration and print the plan: tokens, memory, files. Loads no model."""
    from evo_grpo.cli.check import check as check_file

    check_file(file, settings or ())


@app.command()
def run(
    file: File = Path("population.yaml"),
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Run folder; default: runs/<name>-<n>."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a run that is there.")] = False,
    debug: Debug = False,
) -> None:
    """Train and evolve the population that a configuration describes."""
    from evo_grpo import settings as config

    loaded = config.load(file, settings or ())
    for warning in config.warnings(loaded):
        _warn(warning)

    def play(progress: RunProgress) -> Path:
        from evo_grpo.training import run as play_rounds

        return play_rounds(loaded, out=out, force=force, observer=progress)

    _follow(play)


@app.command()
def resume(folder: Run, debug: Debug = False) -> None:
    """Go on with a run that was stopped, to the same result."""

    def play(progress: RunProgress) -> Path:
        from evo_grpo.training import resume as play_rounds

        progress.run_dir = folder
        return play_rounds(folder, observer=progress)

    _follow(play)


@app.command()
def leaderboard(
    folder: Run,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    debug: Debug = False,
) -> None:
    """Print where every agent of a run stands, best first; also while the run goes on."""
    from evo_grpo.cli.terminal import result
    from evo_grpo.cli.terminal.output import show, standard_output
    from evo_grpo.record.leaderboard import leaderboard as read_leaderboard

    if as_json + as_csv + as_markdown > 1:
        raise typer.BadParameter("expected one of --json, --csv and --markdown, got several")
    frame = read_leaderboard(folder)
    if as_json:
        typer.echo(result.as_json(frame))
    elif as_csv:
        typer.echo(frame.to_csv(index=False), nl=False)
    elif as_markdown:
        typer.echo(result.as_markdown(frame))
    elif frame.empty:
        typer.echo(f"{folder}: no round is finished yet")
    else:
        console = standard_output()
        show(console, result.leaderboard_table(frame, console.width))


@app.command()
def lineage(folder: Run, debug: Debug = False) -> None:
    """Print the family tree of a run: who came from whom, by which mutation."""
    from evo_grpo.cli.terminal.output import show, standard_output
    from evo_grpo.cli.terminal.result import family_tree
    from evo_grpo.record.family import tree
    from evo_grpo.record.folder import read_rounds

    rounds = read_rounds(folder)
    if not rounds:
        typer.echo(f"{folder}: no round is finished yet")
        return
    members = {agent.member for record in rounds for agent in record.agents}
    title = f"{folder}: {len(members)} members in {len(rounds)} rounds"
    show(standard_output(), family_tree(tree(rounds), title))


@app.command()
def export(
    folder: Run,
    best: Annotated[
        Path, typer.Option("--best", metavar="OUT", help="Folder for the best agent's adapter.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    debug: Debug = False,
) -> None:
    """Write the best agent as a PEFT folder with a model card."""
    from evo_grpo.report.export import export_best

    written = export_best(folder, best, force=force)
    typer.echo(f"wrote {written}: load it with PeftModel.from_pretrained(base, {str(written)!r})")


def _follow(play: Callable[[RunProgress], Path]) -> None:
    """Show a run while it goes on, then its result; say how to go on when it is stopped."""
    from evo_grpo.cli.terminal import RunProgress
    from evo_grpo.cli.terminal.output import standard_output, warnings_by

    gc.enable()  # see evo_grpo.cli.main
    console = standard_output()
    with RunProgress(console) as progress, warnings_by(_warn):
        try:
            folder = play(progress)
        except KeyboardInterrupt:
            progress.view.close()
            typer.echo(progress.stopped(), err=True)
            raise typer.Exit(STOPPED) from None
        except (EvoGrpoError, OSError) as error:
            if progress.began:
                error.add_note(
                    f"mend the cause, then go on with: evo-grpo resume {progress.run_dir}"
                )
            raise
    _show_result(console, folder)


def _show_result(console: Console, folder: Path) -> None:
    from evo_grpo.cli.terminal import result
    from evo_grpo.cli.terminal.output import show
    from evo_grpo.record.folder import read_summary
    from evo_grpo.record.leaderboard import leaderboard as read_leaderboard

    typer.echo()
    show(console, result.leaderboard_table(read_leaderboard(folder), console.width))
    typer.echo()
    summary = read_summary(folder)
    if summary is not None:
        console.print(result.result_line(summary), style="bold", highlight=False)
    console.print(f"run folder: {folder}", highlight=False, soft_wrap=True, markup=False)


def _warn(text: str) -> None:
    typer.secho("warning: ", fg=typer.colors.YELLOW, nl=False, err=True)
    typer.echo(text, err=True)
