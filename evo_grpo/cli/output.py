"""Prints lines and errors for people, and JSON, CSV or Markdown for programs."""

import io
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NoReturn

import typer

from evo_grpo.cli.stopping import INTERRUPTED
from evo_grpo.errors import EvoGrpoError, LostRankError, OtherRankError
from evo_grpo.escaping import printable, printable_lines
from evo_grpo.population.ranks.team import is_silent_rank


def say(text: str, *, err: bool = False) -> None:
    """Print one line with escaped control characters, wrapped between words on a terminal."""
    typer.echo(wrapped(printable(text), err=err), err=err)


def warn(text: str) -> None:
    """Print a coloured "warning:" and the text, as one line, to standard error."""
    shown = wrapped(printable(f"warning: {text}"), err=True).removeprefix("warning: ")
    typer.echo(f"{coloured('warning:', typer.colors.MAGENTA)} {shown}", err=True)


def coloured(text: str, colour: str) -> str:
    """Return a word for standard error, coloured if standard error is a terminal with colours."""
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


def flush_standard_output() -> OSError | None:
    """Flush the buffered output; return the error if this fails.

    After an error the remaining output is discarded, or Python would print another error at exit.
    """
    if sys.stdout is None:  # as after `>&-`
        return None
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


@contextmanager
def errors_to_exit_codes(debug: Callable[[], bool]) -> Generator[None]:
    """Print an expected error of the body, with its traceback if `debug()`; exit with its code."""
    try:
        yield
    except OtherRankError as error:
        # Only the first rank prints an error of another rank; each rank prints a lost rank.
        if is_silent_rank() and not isinstance(error, LostRankError):
            sys.exit(error.exit_code)
        _fail(error, str(error), error.exit_code, debug())
    except EvoGrpoError as error:
        _fail(error, str(error), error.exit_code, debug())  # the message is escaped already
    except BrokenPipeError:
        # `evo-grpo leaderboard RUN | head`: exit quietly.
        flush_standard_output()
        sys.exit(1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(error, printable(f"{where}{error.strerror or error}"), 1, debug())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        # Messages of Click about arguments quote them, so escape them.
        message = getattr(error, "message", None)
        if isinstance(message, str):
            error.__dict__["message"] = printable(message)
        raise


@contextmanager
def bugs_to_exit_codes() -> Generator[None]:
    """On a bug in the body print its escaped traceback, on lost output a message; exit with 1."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # not closed (`>&-`), nor replaced by the caller
        sys.stdout.reconfigure(errors="backslashreplace")  # characters that its encoding lacks
    try:
        yield
    except Exception:  # a bug of any kind
        sys.stderr.write(printable_lines(traceback.format_exc()))
        sys.exit(1)
    finally:
        error = flush_standard_output()
        if error is not None and not isinstance(error, BrokenPipeError):
            _fail(error, f"standard output: {error.strerror}", 1, debug=False)


def _fail(error: Exception, message: str, code: int, debug: bool) -> NoReturn:
    if debug:
        typer.echo(printable_lines("".join(traceback.format_exception(error))), err=True)
    notes = map(printable, getattr(error, "__notes__", []))
    lines = "\n".join([f"error: {message}", *notes]).split("\n")
    text = "\n".join(wrapped(line, err=True) for line in lines).removeprefix("error: ")
    typer.echo(f"{coloured('error:', typer.colors.RED)} {text}", err=True)
    sys.exit(code)
