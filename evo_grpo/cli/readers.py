"""Prints the output of the command `follow`, and ends its process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from evo_grpo.cli.output import say
from evo_grpo.errors import EvoGrpoError
from evo_grpo.escaping import printable, shorten
from evo_grpo.record.wording import count

if TYPE_CHECKING:
    from evo_grpo.readers.follow import Followed

LONGEST = 1000
"""Greatest number of characters in a printed line."""
READER = "reader-"
"""Prefix of the names of reader threads."""


def feed_readers(
    folder: Path, to: Sequence[str], storage: str | None, *, outside: bool, quiet: bool
) -> None:
    """Follow a run, by default with the readers of its settings, and print their progress."""
    output = _own_output()
    print_line = _line_printer(output)
    failed: list[EvoGrpoError] = []

    from evo_grpo.readers.follow import follow_all

    try:
        found = follow_all(folder, to, storage=storage, outside=outside, warn=print_line)
        failed = [one.error for one in found if one.error is not None]
        for one in () if quiet else found:
            if one.error is None:
                print_line(_progress(one))
        for error in failed[1:]:
            print_line(str(error))
        if failed:
            raise failed[0]
    except EvoGrpoError as error:
        if not quiet:
            raise
        print_line(str(error))
        raise typer.Exit(error.exit_code) from None
    finally:
        # A run waits for the end of this output; see `training/followers.py`.
        if output is not sys.stdout:
            with suppress(OSError):
                output.close()
        if failed:
            _exit_if_hanging(failed[0], quiet=quiet)


def _line_printer(output: TextIO) -> Callable[[str], None]:
    """Return a function that prints each line only once; any thread may call it."""
    printed: set[str] = set()

    def print_line(text: str) -> None:
        if text in printed:
            return
        printed.add(text)
        with suppress(OSError):  # the run that reads the output may have ended
            output.write(printable(shorten(" ".join(text.split()), LONGEST)) + "\n")
            output.flush()

    return print_line


def _exit_if_hanging(error: EvoGrpoError, *, quiet: bool) -> None:
    """Exit at once if a reader hangs, because the exit handlers of its package would hang too."""
    if any(thread.name.startswith(READER) for thread in threading.enumerate()):
        if not quiet:
            say(f"error: {error}", err=True)
        os._exit(error.exit_code)


def _progress(one: Followed) -> str:
    where = f", as {one.id}" if one.id else ""
    return f"{one.run}: {one.name} has {count(one.rounds, 'round')}{where}"


def _own_output() -> TextIO:
    """Return standard output, and redirect later prints of packages to standard error."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:  # sys.stdout was replaced by an object without a descriptor
        return sys.stdout
    output = os.fdopen(os.dup(descriptor), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, descriptor)
    return output
