"""One message and an exit code for each error; a traceback with --debug only."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NoReturn

from evo_grpo.errors import EvoGrpoError

STOPPED = 130


@contextmanager
def told(debug: Callable[[], bool] = lambda: False) -> Generator[None]:
    """Tell errors to the user and leave with their exit codes; a bug passes through.

    Args:
        debug: Whether to print the traceback; asked when there is one.
    """
    try:
        yield
    except EvoGrpoError as error:
        _fail(error, str(error), error.exit_code, debug())
    except BrokenPipeError:
        # `evo-grpo leaderboard RUN | head`: end quietly, also when Python flushes at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(error, f"{where}{error.strerror or error}", 1, debug())
    except KeyboardInterrupt:
        sys.exit(STOPPED)


def _fail(error: Exception, text: str, code: int, debug: bool) -> NoReturn:
    # Imported here: what goes well needs neither.
    import traceback

    import typer

    if debug:
        typer.echo("".join(traceback.format_exception(error)), err=True)
    typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
    typer.echo("\n".join([text, *getattr(error, "__notes__", [])]), err=True)
    sys.exit(code)
