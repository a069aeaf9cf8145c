"""A replay on a screen: the winner's schedule, the trainings that replayed it, and the verdict."""

from __future__ import annotations

from rich.table import Table

from evo_grpo.readers.terminal.console import plain_table
from evo_grpo.record.replay import BUDGETS, WINNER, Replay
from evo_grpo.record.schedule import Schedule
from evo_grpo.record.wording import count, hyperparameter, number
from evo_grpo.schema.shown import short_name, shown_value

WINNERS = {
    "last": "the best agent of the last round",
    "archive": "the best agent of any round",
    "mean": "the mean of two survivors, of which the first is followed",
}
# Short: all columns fit a terminal of 80.
VALUES = {"schedule": "schedule", "constant": "its last"}
TOKENS_OF = {"lineage": "the lineage", "run": "the whole run"}


def schedule_title(run: str, schedule: Schedule) -> str:
    """Return who the winner is, in one line."""
    return (
        f"{run}: the winner is member {schedule.member}, {WINNERS[schedule.kind]}; its schedule "
        f"over {count(len(schedule.rounds), 'round')} of {count(schedule.steps, 'step')}:"
    )


def schedule_table(schedule: Schedule) -> Table:
    """Return a schedule as a table, a row per round; rounds count from 1."""
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


def results_table(found: Replay) -> Table:
    """Return the trainings and the winner as a table: how far each is ahead of the winner."""
    titles = ["values", "tokens of", "tokens", "test", "+-", "spread", "ahead by", "+-"]
    rows: list[list[str]] = []
    for one in found.trained:
        ahead = found.difference(one.name, WINNER)
        rows.append(
            [
                VALUES[one.values],
                TOKENS_OF[one.budget],
                f"{one.tokens:,}",
                number(one.test.mean),
                number(one.test.se),
                number(one.spread),
                number(ahead.difference),
                number(ahead.error),
            ]
        )
    mean, error = number(found.winner.mean), number(found.winner.se)
    own = ["the winner", "itself", f"{found.schedule.tokens:,}", mean, error, "", "", ""]
    return plain_table(titles, [*rows, own], texts=2)


def verdict_lines(found: Replay) -> list[str]:
    """Return what the replay says, in plain words."""
    return [*(found.verdict(budget) for budget in BUDGETS), found.caveat()]
