"""A comparison or a replay in the terminal: its arms as bars, their differences, the schedule."""

from __future__ import annotations

import math

from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.table import Table

from evo_grpo.readers.terminal.console import BAD, GOOD, plain_table, safe, say, show
from evo_grpo.record.arms import Arms
from evo_grpo.record.schedule import Schedule
from evo_grpo.record.wording import count, hyperparameter, listed, number, with_error
from evo_grpo.schema.shown import short_name, shown_value

BAR_WIDTH = 40
WINNERS = {
    "last": "the best agent of the last round",
    "archive": "the best agent of any round",
    "mean": "the mean of members {}, of which the schedule follows the first",
}


def show_arms(console: Console, found: Arms) -> None:
    """Print the arms as bars, their differences, and the sentences about them."""
    console.print()
    show(console, arm_bars(found, console.width))
    console.print()
    if found.differences:
        show(console, plain_table(*difference_rows(found), texts=2))
        console.print()
    for sentence in found.sentences:
        say(console, sentence, wrap=True)


def arm_bars(found: Arms, width: int) -> RenderableType:
    """Return one bar per arm, the run or its winner last, for a terminal of `width` columns."""
    means = [0.0 if math.isnan(arm.test.mean) else arm.test.mean for arm in found.arms]
    low, high = min(0.0, *means), max(1.0, *means)
    cells = [
        (
            found.label(arm.name),
            with_error(arm.test.mean, arm.test.se),
            "" if math.isnan(arm.spread) else f"spread {number(arm.spread)}",
            f"{arm.tokens:,} tokens",
        )
        for arm in found.arms
    ]
    columns = [max(map(len, column)) for column in zip(*cells, strict=True)]
    used = sum(columns) + 2 * sum(size > 0 for size in columns)
    room = max(4, min(BAR_WIDTH, width - used))
    grid = Table.grid(padding=(0, 2))
    for arm, (label, value, *details), mean in zip(found.arms, cells, means, strict=True):
        color = BAD if mean < 0 else GOOD if mean == max(means) else "default"
        ends = sorted((-low, mean - low))
        bar = Bar(high - low, *ends, width=room, color=color)
        style = "bold" if arm is found.arms[-1] else ""
        shown = [safe(text, "dim") for text, size in zip(details, columns[2:], strict=True) if size]
        grid.add_row(safe(label, style), bar, safe(value, style), *shown)
    for column in grid.columns:
        column.no_wrap = True
    return grid


def difference_rows(found: Arms) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows of a table of differences, for the terminal and for a page."""
    rows = [
        [
            found.label(one.first),
            found.label(one.second),
            number(one.difference),
            "-" if math.isnan(one.low) else f"[{number(one.low)}, {number(one.high)}]",
        ]
        for one in found.differences
    ]
    return ["arm", "minus", "difference", "95% interval"], rows


def schedule_title(run: str, schedule: Schedule) -> str:
    """Return a line that names the winner and introduces its schedule."""
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
            str(one.round + 1),
            str(one.member),
            *(hyperparameter(one.hparams, name) for name in names),
            shown_value(schedule.prompts_per_step(one)),
            f"{one.tokens:,}",
        ]
        for one in schedule.rounds
    ]
    return plain_table(titles, rows)
