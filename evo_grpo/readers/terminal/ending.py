"""What a run ends with: the leaderboard, its story, what went wrong in it, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding

from evo_grpo.readers.terminal.console import NOTICE, safe, say, show
from evo_grpo.readers.terminal.result import leaderboard_table
from evo_grpo.record.leaderboard import from_records
from evo_grpo.record.story import tell_story
from evo_grpo.record.trouble import find_trouble

if TYPE_CHECKING:
    from evo_grpo.record.records import RoundRecord
    from evo_grpo.settings import RunConfig

PARAGRAPHS = {"schedule": "winner", "validation": "choice"}
"""Kinds of sentences that go on with those of another kind."""
TROUBLE_SHOWN = 5
"""Troubles that an ending shows; a run can have one for each agent and round."""


def show_ending(
    console: Console,
    rounds: Sequence[RoundRecord],
    summary: Mapping[str, Any] | None,
    *,
    comparison: Mapping[str, Any] | None = None,
    config: RunConfig | None = None,
) -> None:
    """Print the leaderboard, and what a run of at least one finished round came to.

    `summary` and `comparison` are what summary.json and compare.json hold; without a summary nobody
    was judged on the test split.
    """
    console.print()
    show(console, leaderboard_table(from_records(rounds), console.width))
    console.print()
    planned = None if config is None else config.population.rounds
    story = tell_story(rounds, summary, comparison=comparison, planned=planned)
    for kind, sentences in groupby(story, lambda one: PARAGRAPHS.get(one.kind, one.kind)):
        text = " ".join(one.text for one in sentences)
        say(console, text, "bold" if kind == "result" else "", wrap=True)
    troubles = find_trouble(rounds, summary, config)
    for trouble in troubles[:TROUBLE_SHOWN]:
        line = safe("").append_text(safe("warning:", f"bold {NOTICE}"))
        say(console, line.append_text(safe(f" {trouble.sentence}")), wrap=True)
    if len(troubles) > TROUBLE_SHOWN:
        say(console, f"and {len(troubles) - TROUBLE_SHOWN} more warnings: see the report")


def show_next(console: Console, run: str, study: tuple[str, str] | None = None) -> None:
    """Print the run folder, and the commands that go on from it.

    `study` has name and database of its Optuna study, where that is not in the folder's journal.
    """
    console.print()
    if study is not None:
        say(console, f"Study: {study[0]} in {study[1]}")
    say(console, f"Run folder: {run}")
    path = shlex.quote(run)
    if console.is_terminal:
        # One below the other, so that each can be selected whole.
        say(console, "Next:")
        for command in _commands(path):
            show(console, Padding(safe(command, "bold"), (0, 0, 0, 2)))
    else:
        say(console, f"Next: {', '.join(_commands(path))}")


def _commands(path: str) -> tuple[str, ...]:
    return f"evo-grpo report {path}", f"evo-grpo export {path} OUT"
