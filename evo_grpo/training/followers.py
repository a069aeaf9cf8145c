"""Starts the process in which readers follow a run: `evo-grpo follow RUN --to ...`.

Readers have a separate process because tracker packages keep global state, print, and slow down
training. The run waits for readers only at its end; the same command can send the rest later.
"""

import os
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Self, final

from evo_grpo.record.names import READERS, REPORT_READER
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord
from evo_grpo.settings import RunConfig

SECONDS_TO_FINISH = 60.0
"""How long a run waits for readers at its end."""
SECONDS_TO_STOP = 4.0
"""How long a stopped run waits for readers; the run has to exit within nine seconds."""
SECONDS_TO_EXIT = 2.0
"""How long a run waits for the readers' process to exit once the process closed its output."""
NICENESS = 10
"""Niceness of the readers' process relative to the run, as in nice(1)."""
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher sets for ranks; the readers' process, which is no rank, lacks them."""

_unfinished_processes: list[subprocess.Popen[bytes]] = []
"""Readers' processes that outlasted the wait, kept because Python warns if one is deleted."""


@final
class Followers(Observer):
    """An observer that starts the readers in a run's settings, and waits for them after the run.

    Exit this context manager only after the run folder is released, because readers end once no
    process trains the run. With `report`, a reader also keeps an HTML report of the run up to date.
    If `trackers` is False, the trackers in the settings are not started.
    """

    def __init__(self, *, report: bool = False, trackers: bool = True) -> None:
        self._report = report
        self._trackers = trackers
        self._process: subprocess.Popen[bytes] | None = None
        self._command = ""
        self._said = SimpleQueue[str | None]()
        self._spoke = self._over = False
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Wait a limited time for the readers; readers that are not done then continue."""
        process = self._process
        if process is None:
            return
        self._over = True
        seconds = SECONDS_TO_STOP if any(raised) else SECONDS_TO_FINISH
        try:
            self._listen(seconds)
        finally:
            _unfinished_processes[:] = [
                child for child in (*_unfinished_processes, process) if child.poll() is None
            ]
        if not self._ended and not any(raised):
            warnings.warn(
                f"readers are still at work after {seconds:g} s, in a process of their own; should "
                f"it be ended before they are done, continue with: {self._command}",
                UserWarning,
                stacklevel=2,
            )

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """Start the readers."""
        assert isinstance(settings, RunConfig), "a run in a folder has settings"
        assert run_dir is not None, "a run in a folder has one"
        named = settings.record.readers
        if not self._trackers:
            kinds = {tracker.kind for tracker in settings.record.trackers}
            named = [name for name in named if name not in kinds]
        names = [*named, *([REPORT_READER] if self._report else [])]
        if names:
            self._start(run_dir, ",".join(names))

    def round_done(self, record: RoundRecord) -> None:
        """Show the readers' warnings."""
        self._listen()

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Show the readers' last warnings; `__exit__` waits for the process."""
        self._over = True
        self._listen()

    def _start(self, run: Path, names: str) -> None:
        # The settings of a run are those of the person who trains it.
        self._command = f"evo-grpo follow {shlex.quote(str(run))} --to {names} --outside"
        command = ["follow", "--quiet", "--outside", "--to", names, "--", str(run.resolve())]
        folder = run / READERS
        try:
            folder.mkdir(exist_ok=True)
            with (folder / "follow.log").open("ab") as log:
                self._process = subprocess.Popen(
                    # -P keeps files in the current folder from shadowing packages.
                    [sys.executable, "-P", "-m", "evo_grpo", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    bufsize=0,  # a buffer has a lock, which the thread would hold at exit
                    stderr=log,
                    env=_environment(),
                    # A new session, because Ctrl-C reaches all processes of the run's session.
                    start_new_session=True,
                )
        except OSError as error:
            warnings.warn(
                f"readers cannot be started ({error}); the run goes on; start them with: "
                f"{self._command}",
                UserWarning,
                stacklevel=3,
            )
            return
        _lower_priority(self._process.pid)
        # The thread ends when the process closes its output, possibly after the end of the run.
        Thread(target=_read, args=(self._process, self._said), name="readers", daemon=True).start()

    def _listen(self, seconds: float = 0.0) -> None:
        """Give a warning for each line that the readers' process printed.

        Also warns, once, if the process failed or ended before the run. Waits up to `seconds` for
        the process to close its output.
        """
        until = time.monotonic() + seconds
        while self._process is not None and not self._ended:
            try:
                line = self._said.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                return
            if line is None:
                self._ended = True
            else:
                self._spoke = True
                warnings.warn(line, UserWarning, stacklevel=3)
        if self._process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_EXIT if seconds else 0)
        code = self._process.poll()
        # Readers end after the run; with exit code 1 or 2 they have printed the reason.
        early = not self._over and code is not None
        if early or (code and not (self._spoke and code in (1, 2))):
            self._process = None
            warnings.warn(
                f"the process of readers ended with code {code}; the run goes on, and its log has "
                f"everything; {READERS}/follow.log may say why; continue with: {self._command}",
                UserWarning,
                stacklevel=3,
            )


def _read(process: subprocess.Popen[bytes], said: SimpleQueue[str | None]) -> None:
    """Put each line of a process's output into a queue, and None after the last line."""
    assert process.stdout is not None, "it was asked for"
    with process.stdout as output:
        for line in output:
            said.put(line.decode(errors="replace").rstrip("\n"))
    said.put(None)


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    root = str(Path(__file__).resolve().parents[2])
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, root]))
    environment["OMP_NUM_THREADS"] = "1"
    return environment


def _lower_priority(process: int) -> None:
    """Lower the priority of a process and its session, so that they do not slow down training."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process, os.nice(0) + NICENESS)
    with suppress(OSError):  # not Linux, a kernel without autogroups, or not permitted
        Path(f"/proc/{process}/autogroup").write_text(str(NICENESS), encoding="ascii")
