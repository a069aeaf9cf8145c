"""What a single value must be, for messages that name the setting, the rule and the value."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, cast

from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.printable import printable

SHOWN_CHARACTERS = 80
"""Longest excerpt of a value."""

MOST_DIGITS = 20
"""Longest integer in a file: 64 bits, with or without a sign, have no more digits."""

LEAST, MOST = 1e-6, 1e6
"""Of a number that logits or log-probs are divided by or multiplied with: float32 holds 1e38."""

LARGEST_REWARD = 1e15
"""Either way: beyond it float64 cannot tell rewards apart that differ by 1, and what is computed
from them leaves float32."""

_TOO_LARGE = 10**MOST_DIGITS
_SURROGATE = re.compile("[\ud800-\udfff]")


class Rule(NamedTuple):
    """What a value must be.

    Attributes:
        good: Says of any object whether it is that; never raises.
        expected: The same in words, for "expected ..., got ...".
        remedy: What to do instead, None where the expectation says it.
    """

    good: Callable[[Any], bool]
    expected: str
    remedy: str | None = None

    def check(self, name: str, value: object) -> None:
        """Refuse a value of a setting with a ConfigError."""
        if not self.good(value):
            more = "" if self.remedy is None else f"; {self.remedy}"
            raise ConfigError(f"{name}: expected {self.expected}, got {shown(value)}{more}")

    def or_none(self) -> Rule:
        """Return the rule that accepts None too."""
        return Rule(lambda v: v is None or self.good(v), f"{self.expected}, or None", self.remedy)


def shown(value: object, most: int = SHOWN_CHARACTERS) -> str:
    """Return a value as a message shows it: a whole model would be pages long."""
    try:
        text = printable(" ".join(repr(value).split()))
    except Exception:  # an object's own __repr__ may raise anything, and so do huge integers
        return f"{type(value).__name__} that cannot be shown"
    return text if len(text) <= most else text[: most - 3] + "..."


def unwritable(value: str | int) -> str | None:
    """Return what a value has to be for every file, path and reader; None where it is that."""
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
    """Return an integer of a JSON file, for `json.loads(..., parse_int=short_integer)`.

    Raises:
        ValueError: It has more than `MOST_DIGITS` digits, which no number here has.
    """
    if len(digits.removeprefix("-")) > MOST_DIGITS:
        raise ValueError(
            f"expected an integer of at most {MOST_DIGITS} digits, got {digits:.30}..."
        )
    return int(digits)


def is_whole(value: object) -> bool:
    """Whether a value is an integer, numpy's too; True and False are none."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def is_number(value: object) -> bool:
    """Whether a value is a real number, numpy's too; True and False are none."""
    return not isinstance(value, bool) and isinstance(value, Real)


def whole(least: int | None = None, remedy: str | None = None) -> Rule:
    """Expect an integer, at least `least`."""
    if least is None:
        return Rule(is_whole, "an integer", remedy)
    return Rule(lambda v: is_whole(v) and v >= least, f"an integer >= {least}", remedy)


def number(good: Callable[[Any], bool], expected: str, remedy: str | None = None) -> Rule:
    """Expect a real number that `good` accepts, which NaN and what no float holds never do."""
    return Rule(lambda v: is_number(v) and _in_float(v) and good(v), expected, remedy)


def _in_float(value: Any) -> bool:  # noqa: ANN401 -- numpy's numbers too
    try:
        return not math.isnan(value)
    except OverflowError:  # an integer of more than 308 digits
        return False


def above_zero() -> Rule:
    """Expect a finite number > 0."""
    return number(lambda v: 0 < v < math.inf, "a finite number > 0")


def not_negative() -> Rule:
    """Expect a finite number >= 0."""
    return number(lambda v: 0 <= v < math.inf, "a finite number >= 0")


def computable(least: float, most: float) -> Rule:
    """Expect a number > 0 that float32 does not turn into 0, infinity or NaN where it is used."""
    return number(
        lambda v: least <= v <= most,
        f"a finite number > 0 that float32 computes with, from {least:g} to {most:g}",
    )


def text(remedy: str | None = None) -> Rule:
    """Expect a string that is not empty."""
    return Rule(lambda v: isinstance(v, str) and bool(v), "a string", remedy)


def flag() -> Rule:
    """Expect True or False."""
    return Rule(lambda v: isinstance(v, bool), "True or False")


def check_all(rules: Mapping[str, Rule], values: Mapping[str, object]) -> None:
    """Refuse the first value that breaks the rule of its name; names without a rule pass."""
    for name, rule in rules.items():
        if name in values:
            rule.check(name, values[name])


def check_folder(name: str, path: object) -> Path:
    """Return the path of a folder to write a checkpoint to, which may be yet to be made.

    Raises:
        ConfigError: It is no path.
        CheckpointError: A file stands there or above, or no folder can be called so.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{name}: expected the path of a folder, got {shown(path)}")
    folder = Path(os.fspath(path))
    if "\0" in str(folder):
        raise CheckpointError(
            f"{name}: expected a folder or a place for one, got {str(folder)!r}, which holds a "
            "null character; choose another path"
        )
    # The nearest that is there; lexists sees a link that leads nowhere.
    found = next((p for p in (folder, *folder.parents) if os.path.lexists(p)), Path())
    if not found.is_dir():
        where = "a file" if found == folder else f"a path below {str(found)!r}, a file"
        raise CheckpointError(
            f"{name}: expected a folder or a place for one, got {str(folder)!r}, {where}; choose "
            "another path, or move the file away"
        )
    return folder


def plain_number(value: Any) -> Any:  # noqa: ANN401 -- what is no number is returned as it came
    """Return Python's own int or float for numpy's, which JSON does not know.

    Also inside of tuples, lists and mappings, which are copied then.
    """
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value).items()
        return {key: plain_number(entry) for key, entry in entries}
    if isinstance(value, tuple | list):
        plain = [plain_number(entry) for entry in cast("Sequence[Any]", value)]
        return tuple(plain) if isinstance(value, tuple) else plain
    if is_whole(value):
        return int(value)
    return value if isinstance(value, int | float) or not is_number(value) else float(value)
