"""A run beside the same population without evolution, as bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.table import Table

from evo_grpo.readers.terminal.console import BAD, GOOD, safe, say, show
from evo_grpo.record.wording import count, with_error

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
LABELS = {"guess": "{} agents at your guess", "random": "{} random guesses", "evolved": "evolved"}
BAR_WIDTH = 40
EQUAL = 0.03
"""By how much tokens may differ, as a share of those of the run, and count as equal."""


def arm_label(name: str, agents: int) -> str:
    """Return a population of a comparison in words, `name` as in compare.json."""
    return LABELS[name].format(NUMBERS[agents] if agents < len(NUMBERS) else agents)


def show_comparison(console: Console, result: Mapping[str, Any]) -> None:
    """Print what compare.json holds: the bars of a comparison, and how it was made."""
    console.print()
    show(console, comparison_bars(result, console.width))
    console.print()
    say(console, basis_line(result), wrap=True)


def comparison_bars(result: Mapping[str, Any], width: int) -> RenderableType:
    """Return one bar per population, the run itself last, for a terminal of `width` columns."""
    arms = result["arms"]
    labels = [arm_label(arm["name"], result["agents"]) for arm in arms]
    means = [arm["test"]["mean"] or 0.0 for arm in arms]
    low, high = min(0.0, *means), max(1.0, *means)
    room = max(8, min(BAR_WIDTH, width - max(map(len, labels)) - 40))
    grid = Table.grid(padding=(0, 2))
    for _ in range(4):
        grid.add_column(no_wrap=True)
    for arm, label, mean in zip(arms, labels, means, strict=True):
        best = mean == max(means)
        bar = Bar(high - low, -low, mean - low, width=room, color=GOOD if best else "default")
        if mean < 0:
            bar = Bar(high - low, mean - low, -low, width=room, color=BAD)
        value = with_error(arm["test"]["mean"], arm["test"]["se"])
        tokens = f"{sum(arm['tokens'].values()):,} tokens"
        style = "bold" if arm["name"] == "evolved" else ""
        grid.add_row(safe(label, style), bar, safe(value, style), safe(tokens, "dim"))
    return grid


def basis_line(result: Mapping[str, Any]) -> str:
    """Return on what the populations of a comparison were compared."""
    totals = [sum(arm["tokens"].values()) for arm in result["arms"]]
    own = totals[-1]
    off = max(abs(total - own) for total in totals) / max(1, own)
    equal = "at equal tokens" if off <= EQUAL else f"at tokens that differ by up to {off:.0%}"
    purposes = ", ".join(
        f"{arm['name']} {arm['tokens']['training']:,} + {arm['tokens']['evaluation']:,}"
        for arm in result["arms"]
    )
    prompts = count(result["arms"][-1]["test"]["n"], result["split"] + " prompt")
    return (
        f"{equal}, on the same {prompts} with the same draws; tokens to train on + to evaluate: "
        f"{purposes}"
    )
