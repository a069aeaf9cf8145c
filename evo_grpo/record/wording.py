"""Formats amounts, numbers and mutations as text, the same in every display."""

import math
from collections.abc import Iterable, Mapping, Sequence

from evo_grpo.schema.hparams import Hparams, Value
from evo_grpo.schema.problems import short_name, shown_value
from evo_grpo.types import Score


def count(amount: int, noun: str) -> str:
    """Return an amount with its noun: 1 round, 6 rounds."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with `digits` digits after the point, "-" for None and NaN."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.{digits}f}"


def with_error(value: float | None, error: float | None, digits: int = 2) -> str:
    """Return a number with its standard error, or alone if the error is None or NaN."""
    if error is None or math.isnan(error):
        return number(value, digits)
    return f"{number(value, digits)} ± {number(error, digits)}"


def measured_on(score: Score, split: str = "validation") -> str:
    """Return the basis of a score: "64 validation prompts", or "8 steps of training"."""
    if score.steps:
        return f"{count(score.steps, 'step')} of training"
    return count(score.n, f"{split} prompt")


def claim_text(who: str, sign: int) -> str:
    """Return a sentence about a difference on shared prompts, by its sign (`evolve.claims`)."""
    if not sign:
        return "no difference shown"
    return f"{who} {'ahead' if sign > 0 else 'behind'} on these prompts"


def listed(parts: Sequence[object]) -> str:
    """Return an enumeration: "1", "1 and 2", "1, 2 and 3"."""
    words = [str(part) for part in parts]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def combined(names: Iterable[str]) -> list[str]:
    """Return each name once, with clip_coef in place of clip_low and clip_high."""
    return list(dict.fromkeys("clip_coef" if n.startswith("clip_") else n for n in names))


def hyperparameter(hparams: Hparams, name: str) -> str:
    """Return one hyperparameter of an agent as text."""
    is_field = name in type(hparams).model_fields  # the text of a clip pair has both ends
    return shown_value(getattr(hparams, name) if is_field else hparams.get(name))


def changes_text(changes: Mapping[str, tuple[Value, Value]], arrow: str = " -> ") -> str:
    """Return the changes of a mutation as text, such as "lr 1e-3 -> 1.2e-3"."""
    return ", ".join(
        f"{short_name(name)} {shown_value(old)}{arrow}{shown_value(new)}"
        for name, (old, new) in changes.items()
    )


def in_words(seconds: float) -> str:
    """Return a number of seconds as text: 26 s, 14 min, 2.9 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
