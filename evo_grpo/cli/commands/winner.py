"""Commands about the winner of a run: export, replay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evo_grpo.cli.commands.app import Allow, Debug, Run, app
from evo_grpo.cli.host_memory import keep_freed_memory
from evo_grpo.cli.output import say, warn
from evo_grpo.cli.stopping import interruptible
from evo_grpo.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from evo_grpo.record.replay import Replay

PANEL = "The winner"


@app.command(rich_help_panel=PANEL)
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

        keep_freed_memory()
        begin()
        title = "training with the schedule and with its last values, side by side"
        with RunProgress(view_for(console), title=title) as progress, warnings_to(warn):
            return train(folder, repeats=repeats, force=force, allow=allow, observer=progress)
