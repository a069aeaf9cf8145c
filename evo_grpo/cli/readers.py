"""The command `follow`: what it prints, and how its process ends."""

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
from evo_grpo.printable import cut, printable
from evo_grpo.record.wording import count

if TYPE_CHECKING:
    from evo_grpo.readers.follow import Followed

LONGEST = 1000
"""Characters of a line that is printed."""
READER = "reader-"
"""How the names of the threads of readers begin."""


def feed_readers(folder: Path, to: Sequence[str], storage: str | None, *, quiet: bool) -> None:
    """Follow a run, by default with the readers of its settings, and print how far each is."""
    output = _own_output()
    tell = _sentences(output)
    failed: list[EvoGrpoError] = []

    from evo_grpo.readers.follow import follow_all

    try:
        found = follow_all(folder, to, storage=storage, say=tell)
        failed = [one.error for one in found if one.error is not None]
        for one in () if quiet else found:
            if one.error is None:
                tell(_so_far(one))
        for error in failed[1:]:
            tell(str(error))
        if failed:
            raise failed[0]
    except EvoGrpoError as error:
        if not quiet:
            raise
        tell(str(error))
        raise typer.Exit(error.exit_code) from None
    finally:
        # A run that waits for its readers waits for the end of their output.
        if output is not sys.stdout:
            with suppress(OSError):
                output.close()
        if failed:
            _end_at_once(failed[0], quiet=quiet)


def _sentences(output: TextIO) -> Callable[[str], None]:
    """Return a function that prints each sentence once; any thread may call it."""
    said: set[str] = set()

    def tell(text: str) -> None:
        if text in said:
            return
        said.add(text)
        with suppress(OSError):  # perhaps it is for a run that has ended: nobody reads it then
            output.write(printable(cut(" ".join(text.split()), LONGEST)) + "\n")
            output.flush()

    return tell


def _end_at_once(error: EvoGrpoError, *, quiet: bool) -> None:
    """End the process where a reader hangs: what packages do at its end would hang too."""
    if any(thread.name.startswith(READER) for thread in threading.enumerate()):
        if not quiet:
            say(f"error: {error}", err=True)
        os._exit(error.exit_code)


def _so_far(one: Followed) -> str:
    where = f", as {one.id}" if one.id else ""
    return f"{one.run}: {one.name} has {count(one.rounds, 'round')}{where}"


def _own_output() -> TextIO:
    """Return standard output; what packages print goes to standard error from here on."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:  # a caller has replaced it
        return sys.stdout
    output = os.fdopen(os.dup(descriptor), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, descriptor)
    return output
