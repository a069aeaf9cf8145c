"""Strings from outside in Markdown: shown as they are, and meaning nothing else."""

from __future__ import annotations

import re

from evo_grpo.printable import printable

_MARKUP = re.compile(r"[\\`*<>\[\]|&~#$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
"""What Markdown takes for more than a character in the middle of a line; not that in group_size."""


def plain(text: str) -> str:
    """Return a string from outside as Markdown that shows it and means nothing else."""
    return _MARKUP.sub(r"\\\g<0>", printable(text))


def code(text: str) -> str:
    """Return a string from outside as a code span, whatever backticks are in it."""
    text = printable(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest or not text else ""
    return f"{fence}{space}{text}{space}{fence}"
