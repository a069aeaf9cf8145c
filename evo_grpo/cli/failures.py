"""Converts errors into a message and an exit code; --debug adds the traceback."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NoReturn

import typer

from evo_grpo.cli.output import (
    coloured,
    flush_standard_output,
    prepare_standard_output,
    wrapped,
)
from evo_grpo.cli.stopping import INTERRUPTED
from evo_grpo.errors import EvoGrpoError, LostRankError, OtherRankError
from evo_grpo.escaping import printable, printable_lines
from evo_grpo.population.ranks.team import is_silent_rank


@contextmanager
def errors_to_exit_codes(debug: Callable[[], bool]) -> Generator[None]:
    """Print an expected error, with its traceback if `debug()`, and exit with its code."""
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
    """Print the traceback of an unexpected exception, escaped; report output that was lost."""
    prepare_standard_output()
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
