"""What the terminal shows of a run: a live table where it can redraw, else plain lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

from evo_grpo.record.observer import Observer

if TYPE_CHECKING:
    from rich.console import Console

    from evo_grpo.cli.terminal.live import LiveTable
    from evo_grpo.cli.terminal.plain import PlainLines
    from evo_grpo.record.records import RoundRecord


@final
class RunProgress(Observer):
    """An observer that shows a run and remembers how far it came; use it in a `with` block.

    Args:
        console: Where to show it; what it can do decides how.

    Attributes:
        run_dir: The run folder, None before the run has one.
        rounds_done: Finished rounds, those before a resume too.
        began: Whether the run began, so that it can be resumed.
    """

    def __init__(self, console: Console) -> None:
        self.run_dir: Path | None = None
        self.rounds_done = 0
        self.began = False
        self.view: PlainLines | LiveTable = _view(console)

    def __enter__(self) -> Self:
        """Show nothing yet: the run says when it starts."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the terminal as it was, also when the run ended in an error."""
        self.view.close()

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """See `Observer`."""
        self.run_dir = run_dir
        self.rounds_done = first_round
        self.began = True
        self.view.started(run_dir, rounds, first_round, settings)

    def stage(self, round: int, name: str, done: int, total: int) -> None:
        """See `Observer`."""
        self.view.stage(round, name, done, total)

    def round_done(self, record: RoundRecord) -> None:
        """See `Observer`."""
        self.rounds_done = record.round + 1
        self.view.round_done(record)

    def finished(self, summary: Mapping[str, Any]) -> None:
        """See `Observer`."""
        self.view.finished(summary)

    def stopped(self) -> str:
        """Say how far a run came that was stopped, and how to go on with it."""
        if self.run_dir is None:
            return "stopped before the run began"
        done = self.rounds_done
        when = f"after round {done}" if done else "before the first round was finished"
        return f"stopped {when}; go on with: evo-grpo resume {self.run_dir}"


def _view(console: Console) -> PlainLines | LiveTable:
    # Imported here: neither view is needed by the commands that print and end.
    if not console.is_terminal or console.is_dumb_terminal:
        from evo_grpo.cli.terminal.plain import PlainLines

        return PlainLines(console)
    from evo_grpo.cli.terminal.live import LiveTable

    return LiveTable(console)
