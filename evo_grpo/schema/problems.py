"""Reports problems of settings and of JSON data, and formats values for messages."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from evo_grpo.errors import ConfigError
from evo_grpo.escaping import printable, shorten

T = TypeVar("T")
Path = tuple[str | int, ...]

MOST_PROBLEMS = 100
"""Largest number of problems in a message. A check stops after one more: finding the nearest name
of each of 10^5 keys takes minutes."""


class Problem(NamedTuple):
    """One problem of a setting.

    Attributes:
        path: Path below the group that reports the problem: names and list indices.
        text: The expectation, the given value, and the remedy.
    """

    path: Path
    text: str


class Problems(ConfigError):
    """Several problems found by one check, one line each.

    Problems of a group inside another group get the path of the inner group.

    Args:
        *problems: The problems.
        source: Source of the settings for the heading: a file, or None for a Python call.
    """

    def __init__(self, *problems: Problem, source: str | None = None) -> None:
        self.problems = tuple(dict.fromkeys(problems))[: MOST_PROBLEMS + 1]
        self.source = source
        lines = [line(problem) for problem in self.problems]
        head = "" if source is None else f"{source}: "
        if len(lines) == 1:
            lines[0] = f"{head}{lines[0]}"
        else:
            count = f"more than {MOST_PROBLEMS}" if lines[MOST_PROBLEMS:] else f"{len(lines)}"
            lines = [f"{head}{count} problems", *lines[:MOST_PROBLEMS]]
        self.text = "\n  ".join(map(printable, lines))  # a line stays one line
        super().__init__(self.text)

    def __str__(self) -> str:
        return self.text  # several lines, each of which is escaped

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are rebuilt from their message, in another process for instance.
        return partial(Problems, source=self.source), self.problems

    def below(self, *path: str | int) -> Problems:
        """Return the same problems with `path` in front of their paths."""
        return Problems(*below(self.problems, *path))

    @classmethod
    def one(cls, text: str, *path: str | int) -> Problems:
        """Return an error that has one problem, with this text and path."""
        return cls(Problem(path, text))


def below(problems: Iterable[Problem], *path: str | int) -> Iterator[Problem]:
    """Yield problems with `path` in front of their paths."""
    for problem in problems:
        yield problem._replace(path=(*path, *problem.path))


def refuse(problems: Iterable[Problem]) -> None:
    """Raise the problems, if there are any."""
    if listed := tuple(problems):
        raise Problems(*listed)


def line(problem: Problem) -> str:
    """Return a problem as one line that starts with its path."""
    return f"{dotted(problem.path)}: {problem.text}" if problem.path else problem.text


def dotted(path: Path) -> str:
    """Return a path as in `evolve.selection.size` or `env.conversation[0].role`."""
    text = ""
    for part in path:
        if isinstance(part, str) and part:
            text += f".{part}" if text else part
        else:  # an index, or a key that is not a name
            text += f"[{part!r}]"
    return text or "the configuration"


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice nearest to a name, or None; one with the same letters is preferred."""
    import difflib  # only needed for messages

    close = difflib.get_close_matches(name, list(choices), n=3)
    return next((c for c in close if sorted(c) == sorted(name)), close[0] if close else None)


def unknown_name(name: str, names: Collection[str], setting: str) -> str:
    """Return the message for a name that the mapping `setting`, with the keys `names`, lacks."""
    near = nearest(name, names)
    hint = f"did you mean {near!r}?" if near else "add it there, or name another one"
    return f"expected one of {setting}: {', '.join(names) or 'none'}, got {name!r}; {hint}"


SHORT_NAMES = {"clip_coef": "clip", "group_size": "group"}
SMALL = 0.01
"""Numbers below this are written with an exponent, so that learning rates are easy to compare."""


def short_name(name: str) -> str:
    """Return the short name of a hyperparameter, for columns and mutations."""
    return SHORT_NAMES.get(name, name)


def shown_value(value: object, digits: int = 3) -> str:
    """Format the value of a hyperparameter: 0.2, 1.4e-3, a name, low:high, else "-".

    A number just below 1, such as a decay rate, gets the digits that its distance from 1 needs.
    """
    if isinstance(value, tuple | list):
        return ":".join(shown_value(end, digits) for end in cast("list[object]", value))
    if isinstance(value, str):
        return value
    if not isinstance(value, int | float):
        return "-"
    if 0 < 1 - value < SMALL:
        return f"{value:.{digits - 1 - math.floor(math.log10(1 - value))}f}".rstrip("0")
    if not 0 < abs(value) < SMALL:
        return f"{value:.{digits}g}"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"


def validated(schema: TypeAdapter[T], data: Mapping[str, Any] | bytes) -> T:
    """Build a value from JSON data, or from their text, as a schema describes it.

    Lists are accepted for tuples, and numbers may be NaN.

    Raises:
        ValueError: The data do not match; the message names the field, expectation and value.
    """
    try:
        # Through JSON: there, strict types accept a list for a tuple.
        text = data if isinstance(data, bytes) else json.dumps(data)
        return schema.validate_json(text, strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        message = details["msg"][:1].lower() + details["msg"][1:]
        if details["type"] == "value_error":  # a validator's message is complete
            message = message.removeprefix("value error, ")
        else:
            message += f", got {shorten(repr(details['input']), 80)}"
        # Older releases of pydantic include the branch of a Mapping's schema in the path.
        path = tuple(
            part
            for part in details["loc"]
            if not str(part).startswith("json-or-python") and part != "[key]"
        )
        raise ValueError(f"{dotted(path)}: {message}") from None
