"""Prints the result of a run: leaderboard, family tree, story, comparison and replay."""

import math
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.tree import Tree

from evo_grpo.escaping import printable
from evo_grpo.readers.terminal.console import (
    BAD,
    GOOD,
    NOTICE,
    new_table,
    plain_table,
    safe,
    say,
    show,
)
from evo_grpo.record.arms import Arms
from evo_grpo.record.family import FamilyMember
from evo_grpo.record.replay import Schedule
from evo_grpo.record.view import RunView
from evo_grpo.record.vocabulary import OBJECTIVE
from evo_grpo.record.wording import changes_text, count, hyperparameter, listed, number, with_error
from evo_grpo.schema.problems import short_name, shown_value

ALWAYS_SHOWN = ("lr", "beta", "clip_coef", "group_size")
"""Hyperparameters that the progress of a run shows even if none of them may mutate."""
BEST = f"bold {GOOD}"
STRINGS = ("checkpoint",)
SCORES = ("fitness", "final", "test")
OPTIONAL = ("final", "test", "left")
"""Columns of the leaderboard that are left out if no row has a value."""
IN_OTHERS = ("round", "tie")
"""Columns that the leaderboard shows in cells of others: the round in `left`, a tie in `rank`."""
ONLY_WIDE = ("parent", "tokens", "wall_seconds", "checkpoint")
WIDE = 150
"""Least width of a terminal, in columns of text, at which the leaderboard has all columns."""
MADE = {
    "restore": "restored",
    "steer-clone": "cloned by hand",
    "steer-set": "set by hand",
    "steer-restore": "restored, then steered by hand",
}
"""Operation that made a member, other than selection or mutation -> words in the family tree."""
ONLY_MEDIUM = ("member",)
MEDIUM = 90
"""Least width of a terminal at which the leaderboard has all columns but `ONLY_WIDE`."""
BAR_WIDTH = 40
WINNERS = {
    "last": "the best agent of the last round",
    "archive": "the best agent of any round",
    "mean": "the mean of members {}, of which the schedule follows the first",
}
PROGRAM = "evo-grpo"
PARAGRAPHS = {"schedule": "winner", "validation": "choice"}
"""Kind of a sentence -> another kind, whose paragraph the sentence continues."""
TROUBLES_SHOWN = 5
"""Most problems that are shown after a run; it can have one for each agent and round."""


def leaderboard_markdown(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the named columns of a leaderboard as a Markdown table."""
    lines = [list(names), ["---" if name in STRINGS else "---:" for name in names]]
    lines += [
        [printable(cell(name, row[name])).replace("|", "\\|") for name in names] for row in rows
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def scores(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns of a leaderboard that are scores: each has a column of standard errors."""
    return [n for n in (rows[0] if rows else ()) if f"{n}_se" in rows[0]]


def columns(rows: Sequence[Mapping[str, Any]], hidden: Sequence[str]) -> list[str]:
    """Return the columns of a leaderboard without `hidden`, empty columns and standard errors."""
    empty = [name for name in OPTIONAL if all(row[name] is None for row in rows)]
    within = [f"{name}_se" for name in scores(rows)]
    return [name for name in (rows[0] if rows else ()) if name not in (*hidden, *empty, *within)]


def redundant(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the clip columns to leave out: clip_coef if any row has a pair, else both bounds."""
    pair = any(row["clip_coef"] is None for row in rows)
    return ("clip_coef",) if pair else ("clip_low", "clip_high")


def leaderboard_table(rows: Sequence[Mapping[str, Any]], width: int) -> Table:
    """Return a leaderboard as a table; it leaves out columns if `width` characters are too few."""
    names = columns(rows, IN_OTHERS)
    if "left" in names:
        names.append(names.pop(names.index("left")))
    if width < WIDE:
        names = [name for name in names if name not in (*ONLY_WIDE, *redundant(rows))]
    if width < MEDIUM:
        names = [name for name in names if name not in ONLY_MEDIUM]
    # A value that all agents share does not distinguish them: drop its column to save space.
    equal = [name for name in ALWAYS_SHOWN if len({str(row[name]) for row in rows}) == 1]
    while equal and _width(names, rows) > width:
        dropped = equal.pop()
        names = [name for name in names if name != dropped]
    return _table(names, rows, short=_width(names, rows) > width)


def show_leaderboard(console: Console, view: RunView) -> None:
    """Print the leaderboard of a run with finished rounds, and a note if its order is unusual."""
    show(console, leaderboard_table(view.leaderboard, console.width))
    if view.order:
        say(console, view.order, "dim", wrap=True)


def _width(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the width of a leaderboard with the columns `names`, in characters."""
    titles = (0 if name == "left" else len(short_name(name)) for name in names)
    cells = (max((len(_shown_cell(name, row)) for row in rows), default=0) for name in names)
    return sum(map(max, titles, cells)) + 2 * (len(names) - 1)


def _table(names: Sequence[str], rows: Sequence[Mapping[str, Any]], *, short: bool) -> Table:
    """Return the named columns of a leaderboard as a table; `short` omits standard errors."""
    table = new_table()
    for name in names:
        justify = "left" if name in (*STRINGS, "rank", "left") else "right"
        # The cells of agents that left name the column.
        title = "" if name == "left" else short_name(name)
        table.add_column(title, justify=justify, no_wrap=True)
    for row in rows:
        style = BEST if row["rank"] == 1 else "dim" if row["left"] is not None else None
        cells = (safe(_shown_cell(name, row, short=short)) for name in names)
        table.add_row(*cells, style=style)
    return table


def family_tree(view: RunView) -> Tree:
    """Return the family tree of a run as a tree of text; members alive in the last round are bold.

    A mean that won is the last branch. Before the first finished round the tree is empty.
    """
    title = f"{count(len(view.founders), 'member')} in {count(len(view.rounds), 'round')}"
    root = Tree(safe(f"{view.folder or view.name}: {title}", "bold"), guide_style="dim")
    for member in view.family:
        _add_branch(root, member, view)
    return root


def _add_branch(parent: Tree, member: FamilyMember, view: RunView) -> None:
    winner = view.winner
    wins = winner is not None and member.id == winner.member
    style = BEST if wins else "bold" if member.alive else ""
    label = safe(f"member {member.id}", style)
    if member.agent is None:
        label.append_text(safe(f"  {_mean(member, view)}", NOTICE))
    else:
        # Rounds count from 1 on a screen; records and file names count from 0.
        first, last = member.born + 1, member.born + len(member.fitness)
        rounds = f"round {first}" if last == first else f"rounds {first}-{last}"
        label.append_text(safe(f"  agent {member.agent}, {rounds}", "dim"))
    label.append_text(safe(f"  {_first_and_last(member, view)}", style))
    notes = [MADE[member.mutation.op]] if member.mutation.op in MADE else []
    if member.mutation.changes:
        notes.append(changes_text(member.mutation.changes))
    if notes:
        label.append_text(safe(f"  {', '.join(notes)}", NOTICE))
    elif member.parent is None:
        label.append_text(safe(f"  lr {shown_value(member.hparams.lr)}", "dim"))
    if wins:
        label.append_text(safe(f"  {winner_label(view)}", BEST))
    branch = parent.add(label)
    for child in member.children:
        _add_branch(branch, child, view)


def _mean(member: FamilyMember, view: RunView) -> str:
    agents = {agent.member: agent.agent for record in view.rounds for agent in record.agents}
    parents = [parent for parent in (member.parent, member.second_parent) if parent is not None]
    return (
        f"mean of members {listed(parents)} (agents "
        f"{listed([agents[parent] for parent in parents])}), final comparison"
    )


def winner_label(view: RunView) -> str:
    """Return the winner's mark in a family tree: its test score, or "best" before the run's end."""
    winner = view.winner
    if winner is None or winner.test is None:
        return "best"
    when = f" after round {winner.record.round + 1}" if winner.kind == "archive" else ""
    return f"winner{when}, test {number(winner.test.mean)}"


def _first_and_last(member: FamilyMember, view: RunView) -> str:
    """Return a member's first and last fitness as text; if it has none, its training rewards."""
    played = [a for record in view.rounds for a in record.agents if a.member == member.id]
    trained = [a.score is not None and a.score.steps > 0 for a in played]
    fitness = [
        mean for mean, of_training in zip_longest(member.fitness, trained) if not of_training
    ]
    prefix = "" if fitness else "reward "
    ends = fitness or list(member.fitness)
    ends = [ends[0], ends[-1]] if len(ends) > 1 else [ends[0]]
    return prefix + " -> ".join("failed" if value is None else number(value) for value in ends)


def _shown_cell(name: str, row: Mapping[str, Any], *, short: bool = False) -> str:
    """Return the text of a cell; a rank includes its tie, a score its standard error."""
    value = row[name]
    if name == "rank":
        return f"{value} tie" if row["tie"] else str(value)
    if name == "left":
        label = "left in" if short else "left after round"
        return "" if value is None else f"{label} {value + 1}"
    if name == "agent" and value is None:
        return "mean"
    if f"{name}_se" in row and value is not None:
        error = row[f"{name}_se"]
        return number(value, 2) + ("" if error is None or short else f" ±{number(error, 2)}")
    return cell(name, value)


def cell(name: str, value: Any) -> str:  # noqa: ANN401 -- a value of any column
    """Return a value of the column `name` as text, "-" if it is None."""
    if value is None:
        return "-"
    if name == "front":
        return "yes" if value else "no"
    if name.removesuffix("_se") in SCORES or name.startswith(OBJECTIVE):
        return number(value)
    if name == "wall_seconds":
        return number(value, 1)
    if name == "tokens":
        return f"{value:,}"
    return shown_value(value) if isinstance(value, float) else str(value)


def show_ending(console: Console, view: RunView) -> None:
    """Print the leaderboard, the story and the problems of a run."""
    console.print()
    if view.rounds:
        show_leaderboard(console, view)
        console.print()
    for kind, sentences in groupby(view.story, lambda s: PARAGRAPHS.get(s.kind, s.kind)):
        text = " ".join(sentence.text for sentence in sentences)
        say(console, text, "bold" if kind == "result" else "", wrap=True)
    for trouble in view.troubles[:TROUBLES_SHOWN]:
        line = safe("").append_text(safe("warning:", f"bold {NOTICE}"))
        say(console, line.append_text(safe(f" {trouble.sentence}")), wrap=True)
    if (hidden_count := len(view.troubles) - TROUBLES_SHOWN) > 0:
        say(console, f"and {hidden_count} more warnings: see the report")


def show_next(
    console: Console, run: str, study: tuple[str, str] | None = None, *, worse: bool = False
) -> None:
    """Print the run folder, and commands that use it.

    `study` has the name and the database of the run's Optuna study; None for the folder's journal.
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
    """Return commands that show and export the run at `path`, and that work in this shell."""
    program = program_name()
    # The report needs plotly, an optional package.
    subcommand = "report" if find_spec("plotly") else "lineage"
    show_command = f"{program} {subcommand} {path}"
    return (show_command,) if worse else (show_command, f"{program} export {path} OUT")


def program_name() -> str:
    """Return the command that starts evo-grpo in the user's shell: its name, or its path.

    The path is needed if the program is not in PATH: `make run` starts .venv/bin/evo-grpo.
    """
    called = Path(sys.argv[0])
    if called.name != PROGRAM or not called.is_file():  # a notebook, a script, another launcher
        return PROGRAM
    on_path = shutil.which(PROGRAM)
    if on_path is not None and Path(on_path).resolve() == called.resolve():
        return PROGRAM
    return shlex.quote(sys.argv[0])


def show_arms(console: Console, compared: Arms) -> None:
    """Print a comparison: its arms as bars, their differences, and sentences about them."""
    console.print()
    show(console, arm_bars(compared, console.width))
    console.print()
    if compared.differences:
        show(console, plain_table(*difference_rows(compared), texts=2))
        console.print()
    for sentence in compared.sentences:
        say(console, sentence, wrap=True)


def arm_bars(compared: Arms, width: int) -> RenderableType:
    """Return a comparison as bars, one for each arm, for a terminal of `width` columns.

    The last arm, the run or its winner, is bold.
    """
    means = [0.0 if math.isnan(arm.test.mean) else arm.test.mean for arm in compared.arms]
    low, high = min(0.0, *means), max(1.0, *means)
    cells = [
        (
            compared.label(arm.name),
            with_error(arm.test.mean, arm.test.se),
            "" if math.isnan(arm.spread) else f"spread {number(arm.spread)}",
            f"{arm.tokens:,} tokens",
        )
        for arm in compared.arms
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    used = sum(widths) + 2 * sum(size > 0 for size in widths)
    room = max(4, min(BAR_WIDTH, width - used))
    grid = Table.grid(padding=(0, 2))
    for arm, (label, value, *details), mean in zip(compared.arms, cells, means, strict=True):
        color = BAD if mean < 0 else GOOD if mean == max(means) else "default"
        ends = sorted((-low, mean - low))
        bar = Bar(high - low, *ends, width=room, color=color)
        style = "bold" if arm is compared.arms[-1] else ""
        extra = [safe(text, "dim") for text, size in zip(details, widths[2:], strict=True) if size]
        grid.add_row(safe(label, style), bar, safe(value, style), *extra)
    for column in grid.columns:
        column.no_wrap = True
    return grid


def difference_rows(compared: Arms) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the rows of a table of the differences between arms."""
    rows = [
        [
            compared.label(pair.first),
            compared.label(pair.second),
            number(pair.difference),
            "-" if math.isnan(pair.low) else f"[{number(pair.low)}, {number(pair.high)}]",
        ]
        for pair in compared.differences
    ]
    return ["arm", "minus", "difference", "95% interval"], rows


def schedule_title(run: str, schedule: Schedule) -> str:
    """Return a line that names the winner above its schedule."""
    kind = WINNERS[schedule.kind].format(listed(schedule.parents) or "that survived")
    return (
        f"{run}: the winner is member {schedule.member}, {kind}; its schedule over "
        f"{count(len(schedule.rounds), 'round')} of {count(schedule.steps, 'step')}:"
    )


def schedule_table(schedule: Schedule) -> Table:
    """Return a schedule as a table with a row per round; rounds count from 1."""
    names = schedule.hyperparameters()
    titles = ["round", "member", *map(short_name, names), "prompts/step", "tokens"]
    rows = [
        [
            str(entry.round + 1),
            str(entry.member),
            *(hyperparameter(entry.hparams, name) for name in names),
            shown_value(schedule.prompts_per_step(entry)),
            f"{entry.tokens:,}",
        ]
        for entry in schedule.rounds
    ]
    return plain_table(titles, rows)
