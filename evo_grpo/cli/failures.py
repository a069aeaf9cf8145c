"""One message and an exit code for each error; a traceback with --debug only."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NoReturn

import typer

from evo_grpo.errors import EvoGrpoError

INTERRUPTED = 130


@contextmanager
def errors_to_exit_codes(debug: Callable[[], bool]) -> Generator[None]:
    """Print an expected error as one message and exit with its code; a bug passes through.

    Args:
        debug: Returns whether to print the traceback too; called only after an error.
    """
    try:
        yield
    except EvoGrpoError as error:
        _fail(error, str(error), error.exit_code, debug())
    except BrokenPipeError:
        # `evo-grpo leaderboard RUN | head`: exit quietly, even when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(error, f"{where}{error.strerror or error}", 1, debug())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _fail(error: Exception, message: str, code: int, debug: bool) -> NoReturn:
    if debug:
        typer.echo("".join(traceback.format_exception(error)), err=True)
    typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
    typer.echo("\n".join([message, *getattr(error, "__notes__", [])]), err=True)
    sys.exit(code)
