"""Strings from outside, made fit to be kept in a record or shown on a screen."""

from __future__ import annotations

MESSAGE_CHARACTERS = 300
"""Longest message from outside, as it is kept or shown."""


def cut(text: str, characters: int = MESSAGE_CHARACTERS) -> str:
    """Return a string of at most so many characters; a longer one says how long it was."""
    if len(text) <= characters:
        return text
    end = f"... ({len(text):,} characters)"
    return text[: characters - len(end)] + end


def raised(error: BaseException) -> str:
    """Return type and message of an exception, cut; its `__str__` may be anything."""
    name = type(error).__name__
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as second:
        return cut(f"{name}, whose __str__ raised {type(second).__name__}")
    return cut(f"{name}: {text}")
