"""`run --report`: the page of a run written anew while it trains, by a process of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evo_grpo.record.names import REPORT
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord
from evo_grpo.report.figures.style import graph_objects

LAST_SECONDS = 120.0
"""How long the end of a run waits for its last page."""


class LiveReport(Observer):
    """Keeps the page of a run up to date; the training thread starts processes and waits for none.

    A page is written after a round as soon as the one before it is done, at low priority; the last
    one once the run is over. One that cannot be written is a warning, and the run goes on.

    Raises:
        EngineUnavailable: plotly is not installed.
    """

    def __init__(self) -> None:
        graph_objects("run --report")
        self.run_dir: Path | None = None
        self._writer: subprocess.Popen[bytes] | None = None
        self._warned = False

    @property
    def page(self) -> Path | None:
        """The page, None before the run has a folder."""
        return None if self.run_dir is None else self.run_dir / REPORT

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """See `Observer`."""
        self.run_dir = run_dir
        self._write()

    def round_done(self, record: RoundRecord) -> None:
        """See `Observer`."""
        if self._writer is None or self._writer.poll() is not None:
            self._write()

    def finished(self, summary: Mapping[str, Any]) -> None:
        """See `Observer`."""
        self._wait()
        self._write()
        self._wait()

    def _write(self) -> None:
        self._look()
        if self.run_dir is None:
            return
        polite = ["nice", "-n", "10"] if shutil.which("nice") else []
        # A session of its own: Ctrl-C is for the run, and the page it leaves is a whole one.
        self._writer = subprocess.Popen(
            [*polite, sys.executable, "-m", "evo_grpo", "report", str(self.run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _wait(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self._writer.kill()
            self._writer.wait()
        self._look()

    def _look(self) -> None:
        """Warn, once, of a page that could not be written."""
        code = None if self._writer is None else self._writer.poll()
        if code and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.page}: the page could not be written; why, says: evo-grpo report "
                f"{self.run_dir}",
                UserWarning,
                stacklevel=3,
            )
