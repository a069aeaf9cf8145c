"""Checks single values by rules; messages name the setting, the rule and the value."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, cast

from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.escaping import printable

SHOWN_CHARACTERS = 80
"""Longest excerpt of a value."""

MOST_DIGITS = 20
"""Largest number of digits of an integer in a file; no 64-bit integer has more."""

LEAST, MOST = 1e-6, 1e6
"""Bounds of a factor on logits or log-probs; float32 holds numbers up to 3e38."""

MAX_RANK = 65_536
"""Largest accepted LoRA rank, above the features of any layer: a larger one is a mistake."""

LARGEST_REWARD = 1e15
"""Largest magnitude of a reward. Beyond it, float64 does not distinguish rewards that differ by 1,
and results exceed float32."""

_TOO_LARGE = 10**MOST_DIGITS
_SURROGATE = re.compile("[\ud800-\udfff]")


class Rule(NamedTuple):
    """A rule for a value.

    Attributes:
        good: Returns whether an object of any type satisfies the rule; never raises.
        expected: The rule in words, for "expected ..., got ...".
        remedy: Advice for the message; None if the expectation is enough.
    """

    good: Callable[[Any], bool]
    expected: str
    remedy: str | None = None

    def check(self, name: str, value: object) -> None:
        """Raise a ConfigError if the value of a setting breaks the rule."""
        if not self.good(value):
            remedy = "" if self.remedy is None else f"; {self.remedy}"
            raise ConfigError(f"{name}: expected {self.expected}, got {shown(value)}{remedy}")

    def or_none(self) -> Rule:
        """Return a rule that also accepts None."""
        return Rule(lambda v: v is None or self.good(v), f"{self.expected}, or None", self.remedy)


def shown(value: object, most: int = SHOWN_CHARACTERS) -> str:
    """Return an excerpt of a value for a message."""
    try:
        text = printable(" ".join(repr(value).split()))
    except Exception:  # a user's __repr__ may raise anything, and huge integers raise too
        return f"{type(value).__name__} that cannot be shown"
    return text if len(text) <= most else text[: most - 3] + "..."


def unwritable(value: str | int) -> str | None:
    """Return what is expected in place of a value that no file can hold; None for other values."""
    if isinstance(value, int):
        return (
            None
            if -_TOO_LARGE < value < _TOO_LARGE
            else f"an integer of at most {MOST_DIGITS} digits"
        )
    if "\0" in value:
        return "text without a null character"
    if not value.isascii() and _SURROGATE.search(value):
        return "text without half a character (a lone surrogate)"
    return None


def short_integer(digits: str) -> int:
    """Parse an integer of JSON; raise ValueError for more than `MOST_DIGITS` digits."""
    if len(digits.removeprefix("-")) > MOST_DIGITS:
        raise ValueError(
            f"expected an integer of at most {MOST_DIGITS} digits, got {digits:.30}..."
        )
    return int(digits)


def is_whole(value: object) -> bool:
    """Return whether a value is an integer, of Python or numpy, but not a bool."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def is_number(value: object) -> bool:
    """Return whether a value is a real number, of Python or numpy, but not a bool."""
    return not isinstance(value, bool) and isinstance(value, Real)


def whole(least: int | None = None, remedy: str | None = None) -> Rule:
    """Return the rule for an integer >= `least`."""
    if least is None:
        return Rule(is_whole, "an integer", remedy)
    return Rule(lambda v: is_whole(v) and v >= least, f"an integer >= {least}", remedy)


def number(good: Callable[[Any], bool], expected: str, remedy: str | None = None) -> Rule:
    """Return the rule for a real number that `good` accepts; NaN and huge integers break it."""
    return Rule(lambda v: is_number(v) and _in_float(v) and good(v), expected, remedy)


def _in_float(value: Any) -> bool:  # noqa: ANN401 -- numpy's numbers too
    try:
        return not math.isnan(value)
    except OverflowError:  # an integer of more than 308 digits
        return False


def above_zero() -> Rule:
    """Return the rule for a finite number > 0."""
    return number(lambda v: 0 < v < math.inf, "a finite number > 0")


def not_negative() -> Rule:
    """Return the rule for a finite number >= 0."""
    return number(lambda v: 0 <= v < math.inf, "a finite number >= 0")


def computable(least: float, most: float) -> Rule:
    """Return the rule for a number in [least, most], the limits of computing in float32."""
    return number(
        lambda v: least <= v <= most,
        f"a finite number > 0 that float32 computes with, from {least:g} to {most:g}",
    )


def text(remedy: str | None = None) -> Rule:
    """Return the rule for a string that is not empty."""
    return Rule(lambda v: isinstance(v, str) and bool(v), "a string", remedy)


def flag() -> Rule:
    """Return the rule for a bool."""
    return Rule(lambda v: isinstance(v, bool), "True or False")


def check_all(rules: Mapping[str, Rule], values: Mapping[str, object]) -> None:
    """Raise a ConfigError for the first value that breaks the rule of its name."""
    for name, rule in rules.items():
        if name in values:
            rule.check(name, values[name])


def check_folder(name: str, path: object) -> Path:
    """Return the path of a checkpoint folder, which need not exist yet.

    Raises:
        ConfigError: `path` is not a path.
        CheckpointError: `path` or a path above it is a file, or `path` has a null character.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{name}: expected the path of a folder, got {shown(path)}")
    folder = Path(os.fspath(path))
    problem = "which holds a null character; choose another path"
    if "\0" not in str(folder):
        # The nearest path that exists; lexists also sees a broken link.
        nearest = next((p for p in (folder, *folder.parents) if os.path.lexists(p)), Path())
        if nearest.is_dir():
            return folder
        obstacle = "a file" if nearest == folder else f"a path below {str(nearest)!r}, a file"
        problem = f"{obstacle}; choose another path, or move the file away"
    raise CheckpointError(
        f"{name}: expected a folder or a place for one, got {str(folder)!r}, {problem}"
    )


def plain_number(value: Any) -> Any:  # noqa: ANN401 -- other values are returned unchanged
    """Return numpy's numbers, also inside tuples, lists and mappings, as Python's int or float."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value).items()
        return {key: plain_number(entry) for key, entry in entries}
    if isinstance(value, tuple | list):
        plain = [plain_number(entry) for entry in cast("Sequence[Any]", value)]
        return tuple(plain) if isinstance(value, tuple) else plain
    if is_whole(value):
        return int(value)
    return value if isinstance(value, int | float) or not is_number(value) else float(value)
