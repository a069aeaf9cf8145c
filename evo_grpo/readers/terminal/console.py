"""Prints to a terminal, in its width and with colours, to a notebook, or to a pipe.

All output passes `safe`, `say` or `warnings_to`, which escape control characters: names, paths,
completions and messages may come from strangers.
"""

import logging
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Self, TextIO, final

from rich.console import Console, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from evo_grpo.escaping import printable, shorten
from evo_grpo.working import LOGGER

WARNING_CHARACTERS = 1000
"""Characters after which a warning is cut; this package's warnings are shorter."""
#: The only colours, legible on black and on white. A colour always repeats what the text says.
GOOD, BAD, NOTICE = "green", "red", "magenta"
PIPE_WIDTH = 200
"""Assumed width of a pipe or a file, in characters; neither has a width."""


LONG_WORK = 2.0
"""Seconds after which work that `evo_grpo.working` reports is shown, if the work still lasts."""


@final
class WorkLines(logging.Handler):
    """A log handler that prints a line for each long piece of work that `evo_grpo.working` reports.

    It handles records within its `with` block. A timer thread prints, because the working thread is
    busy until the work is done.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console
        self._begun: dict[int | None, list[threading.Timer]] = {}

    def __enter__(self) -> Self:
        logger = logging.getLogger(LOGGER)
        self._level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger(LOGGER)
        logger.removeHandler(self)
        logger.setLevel(self._level)
        # After Ctrl-C the work of a generator may end later, or not at all.
        for timer in (timer for timers in self._begun.values() for timer in timers):
            timer.cancel()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line `LONG_WORK` seconds after a piece of work began, unless it ends before."""
        if vars(record)["begins"]:
            line = f"  {record.getMessage()} …"
            timer = threading.Timer(LONG_WORK, say, (self._console, line, "dim"))
            timer.daemon = True
            timer.start()
            self._begun.setdefault(record.thread, []).append(timer)
        elif timers := self._begun.get(record.thread):
            timers.pop().cancel()


def standard_output() -> Console:
    """Return the console of standard output: a terminal, a notebook or a pipe."""
    console = Console(highlight=False)
    # A pipe has no width, and rich would cut its tables at 80 columns.
    is_screen = console.is_terminal or console.is_jupyter
    return console if is_screen else Console(highlight=False, width=PIPE_WIDTH)


def safe(text: str, style: str | Style = "") -> Text:
    """Return a string as a line of text; markup and emoji codes in it have no effect.

    Control characters are escaped.
    """
    return Text(printable(text), style=style)


def say(console: Console, text: str | Text, style: str | Style = "", *, wrap: bool = False) -> None:
    """Print one line: a string, which is made `safe`, or a result of `safe`.

    With `wrap`, a terminal wraps a long line between words. A pipe never does, so that lines can be
    searched.
    """
    line = safe(text, style) if isinstance(text, str) else text
    console.print(line, soft_wrap=not (wrap and console.is_terminal))


def show(console: Console, *parts: RenderableType) -> None:
    """Print tables and trees; in a pipe, lines have no trailing blanks."""
    if console.is_terminal or console.is_jupyter:
        console.print(*parts)
        return
    with console.capture() as captured:
        console.print(*parts)
    lines = captured.get().removesuffix("\n").split("\n")
    console.print(Text("\n".join(map(str.rstrip, lines))), soft_wrap=True)


def new_table() -> Table:
    """Return an empty table in the common style."""
    return Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")


def plain_table(titles: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 0) -> Table:
    """Return a table of strings; the first `texts` columns are words, the others numbers."""
    table = new_table()
    for i, title in enumerate(titles):
        table.add_column(safe(title), justify="left" if i < texts else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(safe, row))
    return table


@contextmanager
def warnings_to(report: Callable[[str], None]) -> Generator[None]:
    """Pass each UserWarning of the `with` block to `report` as one line, without file and line.

    Warnings of other kinds, such as deprecations, keep Python's form.
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
                report(printable(shorten(" ".join(str(message).split()), WARNING_CHARACTERS)))
            else:
                usual(printable(str(message)), category, filename, lineno, file, line)

        warnings.showwarning = show_warning
        yield
