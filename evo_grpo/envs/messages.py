"""Formats parts of messages: the nearest name, lists of names, excerpts of one line."""

from collections.abc import Iterable

from evo_grpo.schema import problems

EXCERPT_CHARACTERS = 80


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ' Did you mean "x"?' for the name most similar to `name`, or ""."""
    similar = problems.nearest(name, names)
    return f' Did you mean "{similar}"?' if similar else ""


def listed(names: Iterable[str]) -> str:
    """Return the sorted names, joined for a message, or "none"."""
    return ", ".join(sorted(names)) or "none"


def excerpt(text: str) -> str:
    """Return a string in quotes, cut to one line of about EXCERPT_CHARACTERS characters."""
    cut = text if len(text) <= EXCERPT_CHARACTERS else text[: EXCERPT_CHARACTERS - 3] + "..."
    return repr(cut)
