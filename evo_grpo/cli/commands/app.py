"""The application: its options that several commands share, and what becomes of errors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from evo_grpo.cli.completion import complete_run, complete_setting
from evo_grpo.cli.failures import errors_to_exit_codes
from evo_grpo.cli.output import say
from evo_grpo.errors import ConfigError

DEBUG = "evo_grpo.debug"


class Commands(TyperGroup):
    """Turns errors into one message and an exit code; --debug adds the traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 -- as for `invoke`
        """Read the options before a command; see the class docstring."""
        with errors_to_exit_codes(lambda: False):
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 -- typer does not export the type of ctx
        """Run a command; see the class docstring."""
        with errors_to_exit_codes(lambda: ctx.meta.get(DEBUG, False)):
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    help="Evolve a population of GRPO agents over one shared language model.",
    no_args_is_help=True,
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
        say(f"evo-grpo {found}")
        raise typer.Exit


Debug = Annotated[
    bool,
    typer.Option(
        "--debug", help="Show the traceback of an error.", callback=_remember_debug, is_eager=True
    ),
]
File = Annotated[Path, typer.Argument(metavar="CONFIG", help="A configuration file in YAML.")]
Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="A run folder, such as runs/one-1.", autocompletion=complete_run
    ),
]
AsDocument = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B.C=VALUE",
        help="Override a setting; VALUE is YAML. May be repeated.",
        autocompletion=complete_setting,
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="NAME",
        help="A file of yours that may have changed, by the name that the error gives. May be "
        "repeated.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FOLDER", help="Run folder; default: runs/<name>-<n>."),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print only errors, and the run folder as the last line."),
]
AsEvents = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one event per line of JSON, for a program, in place of all else."
    ),
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="Then train as many agents without evolution, at your values and at random ones, at "
        "equal tokens, and show all three.",
    ),
]


Report = Annotated[
    bool,
    typer.Option(
        "--report",
        help="Keep report.html in the run folder up to date, a page to watch the run on.",
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        metavar="N",
        min=1,
        help="Processes on this machine, among which the agents are divided.",
    ),
]


Agent = Annotated[
    int | None, typer.Option("--agent", metavar="N", help="An agent in place of the winner.")
]
Member = Annotated[
    int | None,
    typer.Option("--member", metavar="N", help="One life of an agent; see evo-grpo lineage."),
]
Round = Annotated[
    int | None,
    typer.Option(
        "--round",
        metavar="R",
        help="As it was after that round (from 1); alone, the best agent of that round.",
    ),
]
BestEver = Annotated[
    bool, typer.Option("--best-ever", help="The best agent of all rounds, as it was then.")
]


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
    debug: Debug = False,
) -> None:
    """Read the options before a command."""


def from_zero(round: int | None) -> int | None:
    """Return a round, counted from 1 as people do, as records count it; refuse one below 1."""
    if round is not None and round < 1:
        raise ConfigError(f"--round: expected a number from 1 on, got {round}")
    return None if round is None else round - 1


def refuse_folder(file: Path) -> None:
    """Refuse a folder where a configuration file is expected, and say what to do with it."""
    if not file.is_dir():
        return
    from evo_grpo.record.folder import is_run
    from evo_grpo.record.names import CONFIG

    if is_run(file):
        remedy = (
            f"continue this run with: evo-grpo resume {file}; or start another of the same "
            f"configuration with: evo-grpo run {file / CONFIG}"
        )
    elif (file / CONFIG).is_file():
        remedy = f"give the file in it: {file / CONFIG}"
    else:
        remedy = f"write a configuration with: evo-grpo init {file / CONFIG}"
    raise ConfigError(f"{file}: expected a YAML file, got a folder; {remedy}")
