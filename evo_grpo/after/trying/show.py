"""Print the answers of an adapter and its evaluation in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evo_grpo.readers.terminal.console import safe, say
from evo_grpo.record.wording import count, number

if TYPE_CHECKING:
    from rich.console import Console

    from evo_grpo.after.trying.answers import Sampled
    from evo_grpo.after.trying.evaluation import Judged, Result


def show_sampled(console: Console, sampled: Sampled) -> None:
    """Print a prompt and its answers, each with its own line breaks."""
    for line in sampled.prompt.split("\n"):
        say(console, f"> {line}", "bold", wrap=True)
    for one in sampled.answers:
        say(console, f"{one.who}:", "dim")
        for text, reward, ended in zip(one.texts, one.rewards, one.ended, strict=True):
            first, *rest = text.split("\n")
            said = "" if reward is None else f"  [reward {number(reward, 2)}]"
            cut = "" if ended else " ..."
            lines = [first, *rest]
            lines[-1] += cut + said
            for place, line in enumerate(lines):
                say(console, f"{'    ' if place else '  - '}{line}", wrap=True)
    console.print()


def show_judged(console: Console, judged: Judged) -> None:
    """Print the mean reward of an adapter, that of its base, and the difference."""
    each = count(judged.samples, "sample")
    where = f"{count(judged.own.n, judged.split + ' prompt')} of {judged.task}"
    how = f"{each} each at temperature {judged.temperature:g}"
    say(console, f"{judged.adapter}: {_mean(judged.own)} on {where}, {how}", wrap=True)
    if judged.base is None:
        return
    say(console, f"base: {_mean(judged.base)}")
    if judged.gain is None or judged.interval is None:
        return
    low, high = judged.interval
    error = number(judged.gain_se, 4)
    between = "" if low != low else f", 95% interval {low:+.4f} to {high:+.4f}"
    say(console, safe(f"gain: {judged.gain:+.4f} ± {error}{between}", "bold"))


def _mean(result: Result) -> str:
    error = number(result.se, 4)
    return number(result.mean, 4) + ("" if error == "-" else f" ± {error}")
