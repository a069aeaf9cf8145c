"""What a person sees while a run goes on, and at its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evo_grpo.cli.launching import follows
from evo_grpo.cli.output import say, warn
from evo_grpo.cli.stopping import interruptible
from evo_grpo.errors import EvoGrpoError
from evo_grpo.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from evo_grpo.terminal.progress import RunProgress

    Play = Callable[[RunProgress], Path]


def follow_run(
    load: Callable[[], Play],
    *,
    compare: bool,
    folder: Path | None = None,
    allow: Sequence[str] = (),
) -> None:
    """Show a run while it goes on, then its result; after an interruption, how to resume it.

    Args:
        load: Imports what plays the run, and returns it.
        compare: Go on with a comparison.
        folder: The run folder, where it is known before.
        allow: Files that may be others in the comparison.
    """
    from evo_grpo.terminal.console import standard_output, warnings_to
    from evo_grpo.terminal.progress import RunProgress, view_for

    console, option = standard_output(), " --compare" if compare else ""
    progress = RunProgress(None if follows() else view_for(console))
    progress.run_dir = folder

    def stopped() -> str:
        if follows():
            return f"rank {os.environ['RANK']} stopped"
        how = progress.how_to_resume()
        return printable(how if progress.run_dir is None else how + option)

    # What all ranks would say, the first one says.
    tell = (lambda _: None) if follows() else warn
    with interruptible(stopped) as begin, progress, warnings_to(tell):
        play = load()
        begin()
        try:
            finished = play(progress)
        except (EvoGrpoError, OSError) as error:
            if progress.began:
                error.add_note(
                    f"fix the cause, then go on with: evo-grpo resume {progress.run_dir}{option}"
                )
            raise
    if follows():
        return
    from evo_grpo.record.summary import read_summary

    if read_summary(finished) is None:  # as `steer stop-after-round` asks for
        say(stopped())
        return
    _show_result(console, finished)
    if compare:
        _compare(console, finished, allow)


def _compare(console: Console, folder: Path, allow: Sequence[str]) -> None:
    """Train the populations to compare a finished run with, then show all as bars."""
    from evo_grpo.record.names import COMPARISON
    from evo_grpo.terminal.comparison import show_comparison
    from evo_grpo.terminal.console import say as say_to
    from evo_grpo.terminal.console import warnings_to
    from evo_grpo.terminal.progress import RunProgress, view_for

    remedy = f"go on with: evo-grpo resume {folder} --compare"
    say("")
    say("the same population without evolution, at equal tokens:")
    with interruptible(lambda: printable(f"stopped in the comparison; {remedy}")) as begin:
        from evo_grpo.baselines import compare

        begin()
        with RunProgress(view_for(console), limited=True) as progress, warnings_to(warn):
            try:
                result = compare(folder, allow=allow, observer=progress)
            except (EvoGrpoError, OSError) as error:
                error.add_note(f"fix the cause, then {remedy}")
                raise
    show_comparison(console, result)
    say_to(console, f"comparison: {folder / COMPARISON}")


def _show_result(console: Console, folder: Path) -> None:
    from evo_grpo.record.folder import read_rounds
    from evo_grpo.record.summary import read_summary
    from evo_grpo.studies import study_of
    from evo_grpo.terminal.console import say as say_to
    from evo_grpo.terminal.ending import show_ending

    show_ending(console, read_rounds(folder), read_summary(folder), str(folder))
    if (study := study_of(folder)) is not None:
        say_to(console, f"study: {study[0]} in {study[1]}")
