"""The end of a run on a screen: the leaderboard, the story, the problems, and the next commands."""

from __future__ import annotations

import shlex
import shutil
import sys
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding

from evo_grpo.readers.terminal.console import NOTICE, safe, say, show
from evo_grpo.readers.terminal.result import leaderboard_table
from evo_grpo.record.leaderboard import fitness_text, order_text

if TYPE_CHECKING:
    from evo_grpo.record.view import RunView

PROGRAM = "evo-grpo"
PARAGRAPHS = {"schedule": "winner", "validation": "choice"}
"""Kinds of sentences that continue a paragraph of another kind."""
TROUBLES_SHOWN = 5
"""Problems that an ending shows; a run can have one for each agent and round."""


def show_ending(console: Console, view: RunView) -> None:
    """Print the leaderboard, the story and the problems of a run."""
    console.print()
    if view.rounds:
        show(console, leaderboard_table(view.leaderboard, console.width))
        if order := f"{order_text(view.leaderboard)} {fitness_text(view.rounds)}".strip():
            say(console, order, "dim", wrap=True)
        console.print()
    for kind, sentences in groupby(view.story, lambda one: PARAGRAPHS.get(one.kind, one.kind)):
        text = " ".join(one.text for one in sentences)
        say(console, text, "bold" if kind == "result" else "", wrap=True)
    for trouble in view.troubles[:TROUBLES_SHOWN]:
        line = safe("").append_text(safe("warning:", f"bold {NOTICE}"))
        say(console, line.append_text(safe(f" {trouble.sentence}")), wrap=True)
    if (more := len(view.troubles) - TROUBLES_SHOWN) > 0:
        say(console, f"and {more} more warnings: see the report")


def show_next(
    console: Console, run: str, study: tuple[str, str] | None = None, *, worse: bool = False
) -> None:
    """Print the run folder, and commands that use it.

    `study` has the name and the database of its Optuna study, unless it is the folder's journal.
    `worse` says that the winner is worse than the base model, which `export` refuses.
    """
    console.print()
    if study is not None:
        say(console, f"Study: {study[0]} in {study[1]}")
    say(console, f"Run folder: {run}")
    commands = _commands(shlex.quote(run), worse=worse)
    if console.is_terminal:
        # One per line, so that each can be selected whole.
        say(console, "Next:")
        for command in commands:
            show(console, Padding(safe(command, "bold"), (0, 0, 0, 2)))
    else:
        say(console, f"Next: {', '.join(commands)}")


def _commands(path: str, *, worse: bool) -> tuple[str, ...]:
    """Return commands that work in this shell and with the installed packages."""
    program = program_name()
    # The report needs plotly, an optional package.
    look = "report" if find_spec("plotly") else "lineage"
    first = f"{program} {look} {path}"
    return (first,) if worse else (first, f"{program} export {path} OUT")


def program_name() -> str:
    """Return the word that starts evo-grpo in the user's shell.

    `make run` starts .venv/bin/evo-grpo, which PATH does not contain unless the environment is
    activated: then the path is the word.
    """
    called = Path(sys.argv[0])
    if called.name != PROGRAM or not called.is_file():  # a notebook, a script, another launcher
        return PROGRAM
    found = shutil.which(PROGRAM)
    if found is not None and Path(found).resolve() == called.resolve():
        return PROGRAM
    return shlex.quote(sys.argv[0])
