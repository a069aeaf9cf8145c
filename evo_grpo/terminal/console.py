"""Where output goes: a terminal with its width and colours, or a pipe with neither."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, RenderableType

from evo_grpo.printable import cut

WARNING_CHARACTERS = 1000
"""Longest warning; ours are shorter."""
PIPE_WIDTH = 200
"""Columns of a table in a pipe or a file, where nothing says how wide it may be."""


def standard_output() -> Console:
    """Return the console of the command line."""
    console = Console(highlight=False)
    # A terminal knows its width. A pipe does not, and rich would cut tables at 80 columns.
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def show(console: Console, *parts: RenderableType) -> None:
    """Print tables and trees; in a pipe without the blanks that pad their lines."""
    if console.is_terminal:
        console.print(*parts)
        return
    with console.capture() as captured:
        console.print(*parts)
    lines = (line.rstrip() for line in captured.get().splitlines())
    console.print("\n".join(lines), markup=False, emoji=False, soft_wrap=True)


@contextmanager
def warnings_to(report: Callable[[str], None]) -> Generator[None]:
    """Report each warning for users as one line, without the source line that raised it.

    Warnings for developers, such as deprecations, keep Python's form.
    """
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show_warning(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, UserWarning):
                report(cut(" ".join(str(message).split()), WARNING_CHARACTERS))
            else:
                usual(message, category, filename, lineno, file, line)

        warnings.showwarning = show_warning
        yield
