"""Checks of the results of reward functions; errors name function, row and prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from evo_grpo.envs.messages import excerpt
from evo_grpo.errors import RewardError
from evo_grpo.printable import error_text
from evo_grpo.schema.validation import LARGEST_REWARD as LARGEST


class UnusableRewardError(RewardError):
    """A reward is NaN, infinite or too large; unlike a wrong type, it may be a single mistake."""


@dataclass(frozen=True)
class CompletionBatch:
    """B completions with their rows, prompts and the places of the rows in the person's file."""

    completions: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    prompts: Sequence[str]
    places: Sequence[str]

    def title(self, function: str, position: int | None = None) -> str:
        """Return the title of a call for one completion, or with None for all completions."""
        place = self.all_places() if position is None else self._place(position)
        return f"reward function {function!r}, {place}"

    def all_places(self) -> str:
        """Return a description of the batch for messages."""
        return f"{len(self.completions)} completions, the first: {self._place(0)}"

    def _place(self, position: int) -> str:
        return (
            f"{self.places[position]}, prompt {excerpt(self.prompts[position])}, "
            f"completion {excerpt(self.completions[position])}"
        )


def as_list(name: str, value: object, batch: CompletionBatch) -> list[Any]:
    """Return the result of a batch function as a list with one value per completion.

    Raises:
        RewardError: It is no sequence, or of another length.
    """
    count, plain = len(batch.completions), None
    try:
        values = _plain(value)
        if isinstance(values, Sequence) and not isinstance(values, str | bytes):
            plain = list(cast("Sequence[Any]", values))
    except KeyboardInterrupt:
        raise
    except BaseException:  # its methods may raise anything; the error below names it
        pass
    if plain is None or len(plain) != count:
        got = _described(value) if plain is None else len(plain)
        hint = "; does it return its list?" if value is None else ""
        raise RewardError(
            f"reward function {name!r}: expected a list of {count} rewards, one per completion "
            f"(None for one that is not scored), got {got} for {batch.all_places()}{hint}"
        )
    return plain


def _plain(value: object) -> object:
    """Return an array, a tensor or their numbers as Python's lists and numbers."""
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else value


def as_number(name: str, value: object, batch: CompletionBatch, position: int) -> float:
    """Return a reward as a float; None abstains and becomes NaN.

    Raises:
        UnusableRewardError: It is a number, but not finite or beyond `LARGEST`.
        RewardError: It is no number.
    """
    if value is None:
        return math.nan
    kind, expected = RewardError, "a finite number"
    try:
        plain = _plain(value)
        if not isinstance(plain, str | bytes):  # a numeric string is a mistake
            number = float(cast("float", plain))
            if -LARGEST <= number <= LARGEST:  # NaN is not
                return number
            kind = UnusableRewardError
            if math.isfinite(number):
                expected = f"a number from -{LARGEST:g} to {LARGEST:g}"
    except OverflowError:  # an integer of hundreds of digits
        kind = UnusableRewardError
    except KeyboardInterrupt:
        raise
    except BaseException:  # its __float__ may raise anything; the error below names it
        pass
    raise kind(
        f"{batch.title(name, position)}: expected {expected}, or None to abstain, got "
        f"{_described(value)}"
    )


def _described(value: object) -> str:
    """Return a value for a message; its `__str__` may raise."""
    if value is None:
        return "None"
    try:
        if isinstance(value, float):
            return repr(value)
        return f"{type(value).__name__} {excerpt(str(value))}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"{type(value).__name__}, whose __str__ raised {error_text(error)}"
