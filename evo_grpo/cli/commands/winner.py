"""The commands export, recipe and replay; `sampling` has sample and evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evo_grpo.cli.commands.app import (
    Agent,
    Allow,
    BestEver,
    Code,
    Debug,
    Member,
    Prefer,
    Round,
    Run,
    app,
    from_zero,
    weights_of,
)
from evo_grpo.cli.host_memory import keep_freed_memory
from evo_grpo.cli.output import say, warn
from evo_grpo.cli.stopping import interruptible
from evo_grpo.escaping import printable
from evo_grpo.places import expanded

if TYPE_CHECKING:
    from rich.console import Console

    from evo_grpo.record.replay import Replay

PANEL = "The winner"


@app.command(rich_help_panel=PANEL)
def export(  # noqa: PLR0913 -- each is an option of the command
    folder: Run,
    out: Annotated[
        Path | None,
        typer.Argument(metavar="OUT", parser=expanded, help="Folder to write; new or empty."),
    ] = None,
    best: Annotated[
        Path | None,
        typer.Option(
            "--best", metavar="OUT", parser=expanded, help="The same folder, for the winner."
        ),
    ] = None,
    agent: Agent = None,
    member: Member = None,
    round: Round = None,
    best_ever: BestEver = False,
    prefer: Prefer = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="One ordinary model in place of an adapter.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="OWNER/NAME",
            help="Push it to the Hugging Face Hub too, with the token in HF_TOKEN.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Also a winner that is worse than the base model.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write an agent, by default the winner, as a folder for PEFT, transformers and vLLM."""
    from evo_grpo.analysis.export.export import export_choice
    from evo_grpo.readers.terminal.console import warnings_to
    from evo_grpo.record.choice import choose_of

    named = (agent, member, round, prefer) != (None,) * 4 or best_ever
    target = _target(out, best, named=named)
    choice = choose_of(
        folder, agent, member, from_zero(round), best_ever=best_ever, prefer=weights_of(prefer)
    )
    if merge or push:
        say(f"exporting {choice.title} of {folder} ...", err=True)
    with warnings_to(warn):
        written = export_choice(choice, target, merge=merge, push=push, force=force, anyway=anyway)
    how = "AutoModelForCausalLM" if merge else "AutoPeftModelForCausalLM"
    say(f'wrote {written}: {choice.title}; in that folder, {how}.from_pretrained(".") loads it')
    if push is not None:
        say(f"pushed to https://huggingface.co/{push}; a new repository is private")


def _target(out: Path | None, best: Path | None, *, named: bool) -> Path:
    """Return the output folder; `named` says whether another agent than the winner is named."""
    if best is not None and out is None:
        if named:
            text = "--best writes the winner; for another agent give OUT without it"
            raise typer.BadParameter(text)
        return best
    if out is None or best is not None:
        raise typer.BadParameter("expected one output folder, as OUT or as --best OUT")
    return out


@app.command(rich_help_panel=PANEL)
def recipe(
    folder: Run,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE", parser=expanded, help="The file to write."),
    ] = Path("recipe.yaml"),
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Another model; the values stay."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", min=1, help="Rounds; default: those of the winner's line."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help="GRPO steps per round; default: those of the run."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    debug: Debug = False,
) -> None:
    """Write the winner's settings and schedule as a run, for the same or another model."""
    from evo_grpo.analysis.recipe import recipe as write_recipe

    written = write_recipe(folder, out, model=model, rounds=rounds, steps=steps, force=force)
    say(f"wrote {written}; next: evo-grpo check {written}, then evo-grpo run {written}")


@app.command(rich_help_panel=PANEL)
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
    code: Code = None,
    debug: Debug = False,
) -> None:
    """Compare the winner's schedule with its last values: train agents with each."""
    from evo_grpo.places import looking_in
    from evo_grpo.readers.terminal import console as screen
    from evo_grpo.readers.terminal import result as shown
    from evo_grpo.record.folder import code_folder
    from evo_grpo.record.names import REPLAY
    from evo_grpo.record.replay import read_replay, read_schedule

    console = screen.standard_output()
    schedule = read_schedule(folder)
    screen.say(console, shown.schedule_title(str(folder), schedule))
    screen.show(console, shown.schedule_table(schedule))
    found = None if force else read_replay(folder)
    if found is None or repeats not in (None, found.repeats):
        with looking_in(code_folder(code), is_code=True):
            found = _train_replay(console, folder, repeats, force, allow or ())
    shown.show_arms(console, found.arms())
    screen.say(console, f"replay: {folder / REPLAY}")


def _train_replay(
    console: Console, folder: Path, repeats: int | None, force: bool, allow: Sequence[str]
) -> Replay:
    from evo_grpo.readers.terminal.console import warnings_to
    from evo_grpo.readers.terminal.plain import Pace
    from evo_grpo.readers.terminal.progress import RunProgress, view_for

    view = view_for(console)
    view.pace = Pace(whole=True)
    stopped = printable(
        f"stopped: nothing was written; start it again with: evo-grpo replay {folder}"
    )
    with interruptible(lambda: stopped) as begin:
        from evo_grpo.analysis.arms import replay as train

        keep_freed_memory()
        begin()
        title = "training with the schedule and with its last values, side by side"
        with RunProgress(view, title=title) as progress, warnings_to(warn):
            return train(folder, repeats=repeats, force=force, allow=allow, observer=progress)
