"""The commands of `evo-grpo`: their arguments, and what each calls and prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from evo_grpo.cli.failures import errors_to_exit_codes
from evo_grpo.cli.following import follow_run
from evo_grpo.cli.launching import follows, launch_ranks
from evo_grpo.cli.output import say, warn, write, write_file
from evo_grpo.cli.stopping import interruptible
from evo_grpo.errors import ConfigError, RunNotFoundError
from evo_grpo.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from evo_grpo.record.replay import Replay
    from evo_grpo.terminal.progress import RunProgress

    Play = Callable[[RunProgress], Path]

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
        say(f"evo-grpo {found}")
        raise typer.Exit


Debug = Annotated[
    bool,
    typer.Option(
        "--debug", help="Show the traceback of an error.", callback=_remember_debug, is_eager=True
    ),
]
File = Annotated[Path, typer.Argument(metavar="CONFIG", help="A configuration file in YAML.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/one-1.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B.C=VALUE",
        help="Override a setting; VALUE is YAML. May be repeated.",
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
Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="Then train as many agents without evolution, at your values and at random ones, at "
        "equal tokens, and show all three.",
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


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
    debug: Debug = False,
) -> None:
    """Read the options before a command."""


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("population.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    debug: Debug = False,
) -> None:
    """Write a commented configuration, and its JSON Schema for editors."""
    from evo_grpo import settings as config

    if path.is_dir():
        raise ConfigError(
            f"{path}: expected the name of a file to write, got a folder; for instance "
            f"{path / 'population.yaml'}"
        )
    if path.exists() and not force:
        raise ConfigError(
            f"{path}: already exists; choose another name, or replace it with --force"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}; create it first")
    write_file(path, config.template())
    # The first line of the template names this file, for editors.
    beside = path.parent / "population.schema.json"
    if force or not beside.exists():
        write_file(beside, _schema_text())
    say(f"wrote {path}; next: evo-grpo check {path}, then evo-grpo run {path}")


@app.command()
def check(
    file: File = Path("population.yaml"), settings: Settings = None, debug: Debug = False
) -> None:
    """Validate a configuration; print tokens, memory and files."""
    from evo_grpo import settings as config
    from evo_grpo.cli.plan.plan import make_plan
    from evo_grpo.cli.plan.render import render_plan
    from evo_grpo.terminal.console import show, standard_output

    _refuse_folder(file)
    plan = make_plan(config.load(file, settings or ()))
    show(standard_output(), render_plan(plan, str(file)))


@app.command()
def schema(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write it to a file instead.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Print the JSON Schema of a configuration, for editors."""
    if out is None:
        write(_schema_text())
        return
    if not out.parent.is_dir():
        raise ConfigError(f"{out}: there is no folder {out.parent}; create it first")
    if out.is_dir():
        raise ConfigError(f"{out}: expected the name of a file to write, got a folder")
    write_file(out, _schema_text())
    say(f"wrote {out}; name it in a YAML file: # yaml-language-server: $schema={out}")


@app.command()
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

    _refuse_folder(file)
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


@app.command()
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
                    f"{folder}: this run is finished; to play more rounds: evo-grpo resume "
                    f"{folder} --rounds N"
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


@app.command()
def leaderboard(
    folder: Run,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    debug: Debug = False,
) -> None:
    """Print the agents of a run, best first."""
    from evo_grpo.record.leaderboard import leaderboard as read_leaderboard
    from evo_grpo.terminal import result
    from evo_grpo.terminal.console import show, standard_output

    if as_json + as_csv + as_markdown > 1:
        raise typer.BadParameter("expected one of --json, --csv and --markdown, got several")
    frame = read_leaderboard(folder)
    if as_json:
        write(result.leaderboard_json(frame) + "\n")
    elif as_csv:
        write(frame.to_csv(index=False))
    elif as_markdown:
        write(result.leaderboard_markdown(frame) + "\n")
    elif frame.empty:
        say(f"{folder}: no round is finished yet")
    else:
        console = standard_output()
        show(console, result.leaderboard_table(frame, console.width))


@app.command()
def lineage(folder: Run, debug: Debug = False) -> None:
    """Print the family tree of a run, with mutations."""
    from evo_grpo.record.family import tree
    from evo_grpo.record.folder import read_rounds
    from evo_grpo.record.summary import read_summary
    from evo_grpo.terminal.console import show, standard_output
    from evo_grpo.terminal.formatting import count
    from evo_grpo.terminal.result import family_tree

    rounds = read_rounds(folder)
    if not rounds:
        say(f"{folder}: no round is finished yet")
        return
    members = {agent.member for record in rounds for agent in record.agents}
    title = f"{folder}: {count(len(members), 'member')} in {count(len(rounds), 'round')}"
    show(standard_output(), family_tree(tree(rounds), title, read_summary(folder)))


@app.command()
def verify(folder: Run, debug: Debug = False) -> None:
    """Check that every file of a run is as it was written."""
    from evo_grpo.terminal.formatting import count
    from evo_grpo.verifying.verify import verify as look

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


@app.command()
def deliver(
    folder: Run,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            metavar="URL",
            help="Another database than that of the run's settings; without a password.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Bring the trials of a run into its database, as far as they lack there."""
    from evo_grpo.studies import deliver as send
    from evo_grpo.terminal.console import warnings_to
    from evo_grpo.terminal.formatting import count

    with warnings_to(warn):
        for part in send(folder, storage=storage):
            added = f"{count(part.added, 'trial')} delivered" if part.added else "nothing was left"
            say(f"{part.run}: {added}; study {part.study} in {part.storage}")


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
    say(f"wrote {written}: load it with PeftModel.from_pretrained(base, {str(written)!r})")


@app.command()
def replay(
    folder: Run,
    repeats: Annotated[
        int | None,
        typer.Option("--repeats", min=1, help="Trainings of each kind; default: 3."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Train again where a finished replay is there.")
    ] = False,
    allow: Allow = None,
    debug: Debug = False,
) -> None:
    """Compare the winner's schedule with its last values: train agents with each."""
    from evo_grpo.record.names import REPLAY
    from evo_grpo.record.replay import read_replay
    from evo_grpo.record.schedule import read_schedule
    from evo_grpo.terminal import console as screen
    from evo_grpo.terminal import replay as shown

    console = screen.standard_output()
    schedule = read_schedule(folder)
    screen.say(console, shown.schedule_title(str(folder), schedule))
    screen.show(console, shown.schedule_table(schedule))
    say("")
    found = None if force else read_replay(folder)
    if found is None or repeats not in (None, found.repeats):
        found = _train_replay(console, folder, repeats, force, allow or ())
    screen.show(console, shown.results_table(found))
    say("")
    for line in shown.verdict_lines(found):
        screen.say(console, line, wrap=True)
    screen.say(console, f"replay: {folder / REPLAY}")


def _train_replay(
    console: Console, folder: Path, repeats: int | None, force: bool, allow: Sequence[str]
) -> Replay:
    """Train a replay and show how far it is."""
    from evo_grpo.terminal.console import warnings_to
    from evo_grpo.terminal.progress import RunProgress, view_for

    stopped = printable(
        f"stopped: nothing was written; start it again with: evo-grpo replay {folder}"
    )
    with interruptible(lambda: stopped) as begin:
        from evo_grpo.replaying import replay as train

        begin()
        title = "training with the schedule and with its last values, side by side"
        with RunProgress(view_for(console), title=title) as progress, warnings_to(warn):
            return train(folder, repeats=repeats, force=force, allow=allow, observer=progress)


def _schema_text() -> str:
    from evo_grpo.settings import json_schema

    return json.dumps(json_schema(), indent=1) + "\n"


def _refuse_folder(file: Path) -> None:
    """Say what to do with a folder where a configuration file is expected.

    Raises:
        ConfigError: The path is a folder.
    """
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
