"""Prints lines for people, and writes files and text for programs."""

from __future__ import annotations

import io
import os
import shutil
import sys
import textwrap
from pathlib import Path

import typer

from evo_grpo.escaping import printable, printable_lines


def prepare_standard_output() -> None:
    """Escape characters that the encoding of standard output lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # not closed (`>&-`), nor replaced by the caller
        sys.stdout.reconfigure(errors="backslashreplace")


def say(text: str, *, err: bool = False) -> None:
    """Print one line, with control characters escaped; only a terminal wraps it between words."""
    typer.echo(wrapped(printable(text), err=err), err=err)


def warn(text: str) -> None:
    """Print one line to standard error that begins with a coloured "warning:"."""
    shown = wrapped(printable(f"warning: {text}"), err=True).removeprefix("warning: ")
    typer.echo(f"{coloured('warning:', typer.colors.MAGENTA)} {shown}", err=True)


def coloured(text: str, colour: str) -> str:
    """Return a word for standard error, coloured if that is a terminal with colours."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    if plain or sys.stderr is None or not sys.stderr.isatty():
        return text
    return typer.style(text, fg=colour, bold=True)


def wrapped(line: str, *, err: bool = False) -> str:
    """Return a printable line, wrapped between words if it is wider than the terminal."""
    stream = sys.stderr if err else sys.stdout
    if stream is None or not stream.isatty():
        return line
    width = shutil.get_terminal_size().columns
    # Paths and commands stay whole, to be copied.
    parts = textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(parts) if len(line) > width else line


def write(text: str) -> None:
    """Print JSON, CSV or Markdown: unchanged into a pipe, escaped on a terminal."""
    if sys.stdout is None:  # as after `>&-`
        return
    # Do not use typer here: it removes colour codes in a pipe.
    sys.stdout.write(printable_lines(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_file(path: Path, text: str) -> None:
    """Write a text file; if that fails, remove an incomplete new file and raise an OSError."""
    new = not path.exists()
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if new:
            path.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def flush_standard_output() -> OSError | None:
    """Flush the buffered output; return the error if this fails.

    After an error the remaining output is discarded; else Python prints another error at exit.
    """
    if sys.stdout is None:  # as after `>&-`
        return None
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None
