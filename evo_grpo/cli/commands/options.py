"""Defines the Typer application, and options that several commands share."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from evo_grpo.cli.output import errors_to_exit_codes, say
from evo_grpo.escaping import printable

DEBUG = "evo_grpo.debug"
RUNS = "runs"
"""Parent folder of runs without --out."""


class Commands(TyperGroup):
    """Commands whose errors become a message and an exit code; --debug adds the traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 -- as for `invoke`
        """Parse the arguments."""
        with errors_to_exit_codes(lambda: False):
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 -- typer does not export the type of ctx
        """Run a command."""
        with errors_to_exit_codes(lambda: ctx.meta.get(DEBUG, False)):
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    help="Evolve a population of GRPO agents over one shared language model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def complete_run(incomplete: str) -> list[str]:
    """Return the paths that begin with `incomplete`, of runs in runs/ and in the typed folder."""
    from evo_grpo.record.folder import is_run

    beside = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent)
    runs: set[str] = set()
    for folder in {Path(RUNS), beside}:
        with suppress(OSError):  # a missing or unreadable folder
            runs |= {str(path) for path in folder.iterdir() if is_run(path)}
    return sorted(run for run in runs if run.startswith(incomplete) and printable(run) == run)


def complete_setting(incomplete: str) -> list[str]:
    """Return the paths of settings, such as algorithm.lr, that begin with `incomplete`."""
    from evo_grpo.schema.messages import leaves
    from evo_grpo.settings import RunConfig

    names = set(map(".".join, leaves(RunConfig)))
    return sorted(name for name in names if name.startswith(incomplete))


def _remember_debug(ctx: typer.Context, value: bool) -> bool:
    if value:
        ctx.meta[DEBUG] = True
    return value


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version("evo-grpo")
        except PackageNotFoundError:  # `python -m evo_grpo` in a source tree
            number = "(not installed)"
        say(f"evo-grpo {number}")
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
Split = Annotated[
    Literal["train", "validation", "test"], typer.Option("--split", help="Split of the rows.")
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
Code = Annotated[
    Path | None,
    typer.Option(
        "--code",
        metavar="FOLDER",
        help="Also look in this folder for the files and modules that the run names; by default "
        "only in the working folder.",
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="NAME",
        help="Accept that this file of yours has changed since the run began; use the name in "
        "the error. May be repeated.",
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
    typer.Option("--json", help="Print only events, for programs: one JSON object per line."),
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="Afterwards train two populations of the same size without evolution, one at your "
        "values and one at random values, on equal tokens; show all three.",
    ),
]


Report = Annotated[
    bool,
    typer.Option(
        "--report",
        help="Write report.html to the run folder and update it while the run trains.",
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        metavar="N",
        min=1,
        help="Number of processes on this machine; the agents are divided among them.",
    ),
]


Agent = Annotated[
    int | None, typer.Option("--agent", metavar="N", help="This agent instead of the winner.")
]
Member = Annotated[
    int | None,
    typer.Option("--member", metavar="N", help="A member id, as in evo-grpo lineage."),
]
Round = Annotated[
    int | None,
    typer.Option(
        "--round",
        metavar="R",
        min=1,
        help="The agent as it was after this round (from 1); without an agent, the best agent of "
        "the round.",
    ),
]
BestEver = Annotated[
    bool, typer.Option("--best-ever", help="The best agent of all rounds, as it was in its round.")
]
Prefer = Annotated[
    list[str] | None,
    typer.Option(
        "--prefer",
        metavar="OBJECTIVE=WEIGHT",
        help="The agent of the front with the greatest weighted sum of its objectives; those "
        "without a weight share the rest of 1. May be repeated.",
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
    """Define the options that stand before a command."""
