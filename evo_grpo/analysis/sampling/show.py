"""Print the answers of an adapter and its evaluation in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evo_grpo.readers.terminal.console import safe, say
from evo_grpo.record.wording import claim_text, count, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from evo_grpo.analysis.sampling.answers import Sampled
    from evo_grpo.analysis.sampling.evaluation import Judged
    from evo_grpo.analysis.sampling.first_step import Tried
    from evo_grpo.types import Score


def show_sampled(console: Console, sampled: Sequence[Sampled]) -> None:
    """Print a prompt and the answers to it, each with its own line breaks."""
    for line in sampled[0].prompt.split("\n"):
        say(console, f"> {line}", "bold", wrap=True)
    for one in sampled:
        say(console, f"{one.who}:", "dim")
        for text, reward, ended in zip(one.texts, one.rewards, one.ended, strict=True):
            said = "" if reward is None else f"  [reward {number(reward, 2)}]"
            _show_answer(console, text, ("" if ended else " ...") + said)
    console.print()


def _show_answer(console: Console, text: str, after: str) -> None:
    for place, line in enumerate((text + after).split("\n")):
        say(console, f"{'    ' if place else '  - '}{line}", wrap=True)


def show_tried(console: Console, tried: Tried) -> None:
    """Print prompts, answers and rewards before training, and the conclusions from them."""
    for prompt in tried.prompts:
        say(console, f"prompt of {count(prompt.tokens, 'token')}, as the model gets it:", "dim")
        for line in prompt.prompt.split("\n"):
            say(console, f"> {line}", "bold", wrap=True)
        for answer in prompt.answers:
            values = ", ".join(f"{name} {number(x, 2)}" for name, x in answer.rewards.items())
            total = "" if len(answer.rewards) < 2 else f", sum {number(answer.reward, 2)}"
            cut = "" if answer.ended else " ... (cut off)"
            _show_answer(console, answer.text or answer.error, f"{cut}  [{values}{total}]")
        console.print()
    for line in tried.sentences():
        say(console, line, wrap=True)


def show_judged(console: Console, judged: Judged) -> None:
    """Print the mean reward of an adapter, that of its base, and the difference."""
    each = count(judged.samples, "sample")
    where = f"{count(judged.own.n, judged.split + ' prompt')} of {judged.task}"
    how = f"{each} each at temperature {judged.temperature:g}"
    if not judged.temperature:
        how = "decoded greedily"
    say(console, f"{judged.adapter}: {_mean(judged.own)} on {where}, {how}", wrap=True)
    if judged.base is not None:
        say(console, f"base: {_mean(judged.base)}")
    _show_gain(console, judged)
    if judged.sign is not None:
        say(console, claim_text("adapter", judged.sign))
    for one in judged.passes:
        base = "" if one.base is None else f", base {_mean(one.base)}"
        say(console, f"pass@{one.k}: {_mean(one.own)}{base}")
        _show_gain(console, one)
    if judged.passes:
        say(console, f"correct: a reward of at least {judged.correct:g}", "dim")


def _show_gain(console: Console, found: Judged) -> None:
    if found.gain is None or found.interval is None:
        return
    low, high = found.interval
    error = number(found.gain_se, 4)
    between = "" if low != low else f", 95% interval {low:+.4f} to {high:+.4f}"
    say(console, safe(f"gain: {found.gain:+.4f} ± {error}{between}", "bold"))


def _mean(result: Score) -> str:
    error = number(result.se, 4)
    return number(result.mean, 4) + ("" if error == "-" else f" ± {error}")
