"""Where the thread of a tracker sends what it is told: a process, or an object of accelerate's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, final

from evo_grpo.printable import cut
from evo_grpo.trackers.told import Beginning, Entry, side_by_side

_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher says of the ranks of a run, of which the tracker is none."""
_WORKER = "evo_grpo.trackers.worker"


class Outlet(Protocol):
    """Takes entries, on a thread that may wait for it."""

    def begin(self, beginning: Beginning) -> None:
        """Begin a run."""
        ...

    def log(self, entries: Sequence[Entry]) -> None:
        """Take entries."""
        ...

    def end(self) -> None:
        """Wait until all is written."""
        ...

    def close(self) -> None:
        """Wait until nothing of it is left."""
        ...

    def leave(self) -> bool:
        """Stop waiting, from another thread; returns whether all will be written all the same."""
        ...


class TrackerFailed(Exception):
    """A tracker said why it cannot go on; to be caught, not shown."""


@final
class ProcessOutlet:
    """A process that writes to a tracker."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._told_all = False

    def begin(self, beginning: Beginning) -> None:
        """See `Outlet`."""
        log = os.devnull
        if beginning.folder is not None:
            Path(beginning.folder).mkdir(parents=True, exist_ok=True)
        if beginning.state is not None:
            state = Path(beginning.state)
            state.parent.mkdir(exist_ok=True)
            log = str(state.with_suffix(".log"))
        with Path(log).open("a", encoding="utf-8") as said:
            # -P: whatever lies in the current folder is not imported in place of a package.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                encoding="utf-8",
                env=_environment(),
                # Ctrl-C reaches all processes of a session: the run decides when it is over.
                start_new_session=True,
            )
        self._send(beginning.line)

    def log(self, entries: Sequence[Entry]) -> None:
        """See `Outlet`."""
        self._send("".join(entry.line for entry in entries))

    def end(self) -> None:
        """See `Outlet`: the process says that it has written all, and then ends by itself."""
        self._told_all = True  # before: from then on it is not to be killed
        try:
            self._send("null\n")
        except TrackerFailed:
            self._told_all = False
            raise
        self._check_done()

    def close(self) -> None:
        """See `Outlet`."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None, "it was asked for"
        assert process.stdout is not None, "it was asked for"
        with suppress(OSError):  # what it had not read is lost with it
            process.stdin.close()
        with process.stdout:
            process.wait()

    def leave(self) -> bool:
        """See `Outlet`: a process that was told everything ends by itself."""
        if self._process is not None and not self._told_all:
            self._process.kill()
        return self._told_all

    def _send(self, lines: str) -> None:
        process = self._process
        assert process is not None, "begun"
        assert process.stdin is not None, "it was asked for"
        try:
            process.stdin.write(lines)
            process.stdin.flush()
        except OSError:
            self._check_done()
            raise TrackerFailed("its process has ended") from None

    def _check_done(self) -> None:
        """Wait for the process to say how it came out.

        Raises:
            TrackerFailed: It has not written all.
        """
        process = self._process
        assert process is not None, "begun"
        assert process.stdout is not None, "it was asked for"
        for line in process.stdout:
            told = _verdict(line)
            if "done" in told:
                return
            if "failed" in told:
                raise TrackerFailed(cut(str(told["failed"])))
        raise TrackerFailed(f"its process ended with code {process.wait()}")


@final
class AccelerateOutlet:
    """One of accelerate's trackers, or another of that interface, made by the user.

    Args:
        tracker: An `accelerate.tracking.GeneralTracker`.
    """

    def __init__(self, tracker: Any) -> None:  # noqa: ANN401 -- by its methods
        self._tracker = tracker

    def begin(self, beginning: Beginning) -> None:
        """See `Outlet`."""
        start = getattr(self._tracker, "start", None)
        if callable(start):
            start()
        self._tracker.store_init_configuration(dict(beginning.settings))

    def log(self, entries: Sequence[Entry]) -> None:
        """See `Outlet`."""
        for entry in entries:
            if values := side_by_side(entry):
                self._tracker.log(values, step=entry.step)

    def end(self) -> None:
        """See `Outlet`."""
        self._tracker.finish()

    def close(self) -> None:
        """See `Outlet`: that was all."""

    def leave(self) -> bool:
        """See `Outlet`: a thread cannot be ended, and ends with the program."""
        return False


def _verdict(line: str) -> dict[str, Any]:
    """Return what a process says of its end; nothing where Python itself printed a line."""
    try:
        told: Any = json.loads(line)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _environment() -> dict[str, str]:
    """Return the environment of a tracker's process, in which this package is found."""
    found = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    here = str(Path(__file__).resolve().parents[2])
    paths = [path for path in found.get("PYTHONPATH", "").split(os.pathsep) if path]
    found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, here]))
    found["OMP_NUM_THREADS"] = "1"
    return found
