"""A replay as tables and lines."""

import io

from rich.console import Console
from shown_replay import BETTER, ROUNDS, replay, schedule

from evo_grpo.readers.terminal.replay import (
    WINNERS,
    results_table,
    schedule_table,
    schedule_title,
    verdict_lines,
)


def lines(table, width=120):
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_schedule_counts_rounds_from_one_and_shows_what_may_move():
    shown = lines(schedule_table(schedule()))
    assert shown[0].split()[2:] == [
        *("lr", "beta", "clip", "group", "temperature", "prompts/step", "tokens")
    ]
    assert shown[3].split() == ["3", "9", "2e-3", "0", "0.2", "5", "1", "13", "1,040"]
    still = lines(schedule_table(schedule(ROUNDS[:2], mutable=("lr",))))
    assert "temperature" not in still[0]


def test_the_title_names_every_kind_of_winner():
    for kind, words in WINNERS.items():
        title = schedule_title("runs/one", schedule(kind=kind))
        assert title.startswith(f"runs/one: the winner is member 9, {words}; its schedule over 3")


def test_the_results_fit_a_usual_terminal():
    found = replay({"schedule-run": BETTER})
    shown = lines(results_table(found), width=80)
    assert len(shown) == 6
    assert "…" not in "".join(shown)
    assert shown[3].split()[:6] == ["schedule", "the", "whole", "run", "6,176", "0.750"]
    assert shown[3].split()[-3:-1] == ["0.000", "0.250"]
    assert shown[5].split() == ["the", "winner", "itself", "1,808", "0.500", "0.129"]


def test_the_verdict_ends_with_what_it_does_not_cover():
    found = replay()
    assert verdict_lines(found)[:2] == [found.verdict("lineage"), found.verdict("run")]
    assert verdict_lines(found)[2] == found.caveat()
