"""Where text goes: a terminal with its width and colours, or a pipe with neither."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PLAIN_WIDTH = 200
"""Columns of a table in a pipe or a file, where nothing says how wide it may be."""


def standard_output() -> Console:
    """Return the console of the command line."""
    # Imported here: rich takes a tenth of the time of a command that can do without it.
    from rich.console import Console

    console = Console(highlight=False)
    # A terminal knows its width. A pipe does not, and rich would cut tables at 80 columns.
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def show(console: Console, *parts: RenderableType) -> None:
    """Print tables and trees; in a pipe without the blanks that fill up their lines."""
    if console.is_terminal:
        console.print(*parts)
        return
    with console.capture() as captured:
        console.print(*parts)
    lines = (line.rstrip() for line in captured.get().splitlines())
    console.print("\n".join(lines), markup=False, emoji=False, soft_wrap=True)


def fits_as_it_is(lines: Iterable[str]) -> bool:
    """Return whether `show` would print these lines unchanged: to a pipe, with nothing to fold."""
    # Closed (`>&-`), it is None. With these two variables rich may take a pipe for a terminal.
    output: TextIO | None = sys.stdout
    if output is None or output.isatty() or {"FORCE_COLOR", "TTY_COMPATIBLE"} & os.environ.keys():
        return False
    # A character beyond ASCII may be two columns wide, and rich expands tabs.
    return all(
        len(line) <= PLAIN_WIDTH
        and line.isascii()
        and line.isprintable()
        and not line.endswith(" ")
        for line in lines
    )


@contextmanager
def warnings_by(tell: Callable[[str], None]) -> Generator[None]:
    """Tell warnings to the user as one line each, without the place in the source that gave them.

    Those for developers, such as deprecations, keep Python's form.
    """
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, UserWarning):
                tell(" ".join(str(message).split()))
            else:
                usual(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield
