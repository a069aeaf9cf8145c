"""Strings from outside, made fit to be kept in a record or shown on a screen."""

from __future__ import annotations

import unicodedata

MESSAGE_CHARACTERS = 300
"""Longest message from outside, as it is kept or shown."""

_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories of what a screen obeys or hides instead of drawing it: control characters,
formats (text direction, zero width, byte order mark, tags), lone surrogates, ends of lines."""


def printable(text: str) -> str:
    r"""Return a string that stays on its line of a screen and does nothing there but stand.

    What a screen would obey or hide is written as Python writes it: `\x1b`, `\n`, `\u202e`. All
    else is left as it is. So are backslashes, so that a string may pass twice: a message is escaped
    where it is built and once more where it is shown.
    """
    if text.isprintable():  # most are, and those are returned in one look
        return text
    return "".join(
        one.encode("unicode_escape").decode("ascii")
        if unicodedata.category(one) in _UNSAFE
        else one
        for one in text
    )


def printable_lines(text: str) -> str:
    """Return a text of several lines, each made `printable`, for what has lines of its own."""
    return "\n".join(printable(line) for line in text.split("\n"))


def cut(text: str, characters: int = MESSAGE_CHARACTERS) -> str:
    """Return a string of at most so many characters; a longer one says how long it was."""
    if len(text) <= characters:
        return text
    end = f"... ({len(text):,} characters)"
    return text[: characters - len(end)] + end


def raised(error: BaseException) -> str:
    """Return type and message of an exception on one line, cut; its `__str__` may be anything."""
    name = type(error).__name__
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as second:
        return printable(cut(f"{name}, whose __str__ raised {type(second).__name__}"))
    return printable(cut(f"{name}: {text}"))
