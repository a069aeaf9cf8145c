"""What reward functions return, checked: a mistake is named by function, row and prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from evo_grpo.envs.messages import excerpt
from evo_grpo.errors import RewardError


@dataclass(frozen=True)
class CompletionBatch:
    """B completions with their rows, prompts and row numbers; made by `scoring.score`."""

    completions: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    prompts: Sequence[str]
    numbers: Sequence[int]

    def place(self, position: int) -> str:
        """Say for a message which completion is meant."""
        return (
            f"row {self.numbers[position]}, prompt {excerpt(self.prompts[position])}, "
            f"completion {excerpt(self.completions[position])}"
        )

    def all_places(self) -> str:
        """Say for a message which completions a batch function got."""
        return f"{len(self.completions)} completions, the first: {self.place(0)}"


def as_list(name: str, value: object, batch: CompletionBatch) -> list[Any]:
    """Check what a batch function returned: one value per completion."""
    count = len(batch.completions)
    tolist = getattr(value, "tolist", None)  # of numpy, torch, pandas
    plain: object = tolist() if callable(tolist) else value
    if isinstance(plain, str | bytes) or not isinstance(plain, Sequence):
        raise RewardError(
            f"reward function {name!r}: expected a list of {count} numbers, got "
            f"{_what(plain)} for "
            f"{batch.all_places()}{'; does it return its list?' if plain is None else ''}"
        )
    if len(plain) != count:
        raise RewardError(
            f"reward function {name!r}: expected {count} rewards, one per completion, got "
            f"{len(plain)} for "
            f"{batch.all_places()}; return None for a completion that is not scored"
        )
    return list(plain)


def as_number(name: str, value: object, batch: CompletionBatch, position: int) -> float:
    """Check one reward: a finite number, or None, which abstains and becomes NaN."""
    if value is None:
        return math.nan
    try:
        # A numeric string is a mistake too; numpy deprecates floats from arrays of one element.
        number = (
            math.nan
            if isinstance(value, str | bytes) or getattr(value, "ndim", 0)
            else float(cast("float", value))
        )
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isfinite(number):
        return number
    raise RewardError(
        f"reward function {name!r}, {batch.place(position)}: expected a finite number, or "
        "None to abstain, "
        f"got {_what(value)}"
    )


def _what(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, float):
        return repr(value)
    return f"{type(value).__name__} {excerpt(str(value))}"
