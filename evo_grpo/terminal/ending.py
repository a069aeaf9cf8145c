"""What a run ends with, in sentences: who won, by how much, from which tokens, and what is next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text

from evo_grpo.record.leaderboard import best_agent, from_records
from evo_grpo.record.stopping import why_it_ended
from evo_grpo.record.winner import finalist_name, other_finalists, winning_lines
from evo_grpo.terminal.console import safe, say, show
from evo_grpo.terminal.formatting import count, hyperparameter, short_name
from evo_grpo.terminal.result import leaderboard_table

if TYPE_CHECKING:
    from evo_grpo.record.records import AgentRecord, RoundRecord

OPTIMISTIC = (
    "a winner's validation score is optimistic, since it was chosen by it: by 0.04 as measured "
    "on sums"
)
"""Measured over seeds with 64 validation prompts: what the score is above the test result."""
VALUES_SHOWN = 6
"""Values of a hyperparameter up to which a schedule shows all of them."""
COMMANDS = ("leaderboard {}", "lineage {}", "replay {}", "export {} --best OUT")


def show_ending(
    console: Console,
    rounds: Sequence[RoundRecord],
    summary: Mapping[str, Any] | None,
    run: str | None,
) -> None:
    """Print the leaderboard and what a run ended with.

    Args:
        console: Where to.
        rounds: The finished rounds, first to last; at least one.
        summary: What summary.json holds; None where nobody was judged on the test split.
        run: The run folder as the commands take it, None where nothing was written.
    """
    console.print()
    show(console, leaderboard_table(from_records(rounds), console.width))
    console.print()
    for sentence in ending(rounds, summary):
        say(console, sentence, wrap=True)
    if run is not None:
        say(console, f"run folder: {run}")
        commands = [safe(f"evo-grpo {command.format(run)}", "dim") for command in COMMANDS]
        say(console, "next:")
        show(console, Padding(Group(*commands), (0, 0, 0, 2)))


def ending(rounds: Sequence[RoundRecord], summary: Mapping[str, Any] | None) -> Iterator[Text]:
    """Yield what a run ended with, a sentence each.

    Args:
        rounds: The finished rounds, first to last; at least one.
        summary: What summary.json holds; None where nobody was judged on the test split.
    """
    if summary is None:
        best = best_agent(rounds[-1])
        if best is not None and best.score is not None:
            yield safe(f"agent {best.agent} is the best by validation: {best.score.mean:.2f}")
            yield safe(OPTIMISTIC)
        return
    best = summary["best"]
    lines = winning_lines(rounds, best)
    if why := why_it_ended(summary):
        yield safe(why)
    yield safe(_won(rounds, summary))
    yield safe(OPTIMISTIC)
    yield safe(_share(rounds, lines))
    yield safe(result_line(summary), "bold")
    yield safe(schedule_line(lines[0], rounds[-1].mutable))


def result_line(summary: Mapping[str, Any]) -> str:
    """Return the comparison of base and winner on the test split, with the paired error."""
    base, best = summary["base"], summary["best"]
    gain = f"{summary['gain']:+.2f}{_error(summary['gain_se'])}"
    return (
        f"base {base['mean']:.2f} -> best {best['mean']:.2f}{_error(best['se'])} ({gain}) on "
        f"{count(best['n'], summary['split'] + ' prompt')}"
    )


def schedule_line(line: Sequence[AgentRecord], mutable: Sequence[str]) -> str:
    """Return what the winner was trained with, round by round: only what moved.

    Args:
        line: Its line of ancestors.
        mutable: What may mutate in the run.
    """
    moved = [_combined(name) for record in line for name in record.mutation.changes]
    shown = moved or [_combined(name) for name in mutable]
    parts: list[str] = []
    for name in dict.fromkeys(shown):
        values = [value for value, _ in groupby(hyperparameter(r.hparams, name) for r in line)]
        if len(values) > VALUES_SHOWN:
            values = [*values[: VALUES_SHOWN - 2], "…", values[-1]]
        parts.append(f"{short_name(name)} {' → '.join(values)}")
    said = ", ".join(parts) or "no hyperparameter may mutate"
    return f"schedule: {said}{'' if moved or not parts else ', which never moved'}"


def _combined(name: str) -> str:
    return "clip_coef" if name.startswith("clip_") else name


def _won(rounds: Sequence[RoundRecord], summary: Mapping[str, Any]) -> str:
    best = summary["best"]
    name = finalist_name(rounds, best)
    compared = other_finalists(rounds, summary)
    if compared is None:
        when = "of all rounds" if best["kind"] == "archive" else "of the last round"
        return f"{name} won: it was the best {when}, at {best['fitness']:.2f}"
    own, others = compared
    return (
        f"{name} won the final comparison: {own['mean']:.2f} against {others} on "
        f"{count(own['n'], 'validation prompt')}"
    )


def _share(rounds: Sequence[RoundRecord], lines: Sequence[Sequence[AgentRecord]]) -> str:
    line = {(one.round, one.agent): one.tokens for records in lines for one in records}
    total = sum(agent.tokens for record in rounds for agent in record.agents)
    own = sum(line.values())
    return (
        f"the winner's line of ancestors trained on {own / max(1, total):.0%} of all training "
        f"tokens ({own:,} of {total:,})"
    )


def _error(value: float | None) -> str:
    return "" if value is None else f" ± {value:.2f}"
