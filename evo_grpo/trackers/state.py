"""How far a tracker is with a run, in a file beside what it wrote."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, final

from evo_grpo.trackers.backends.protocol import Progress


class RunReplaced(Exception):
    """The run folder that a tracker belongs to has been replaced; nothing is left to be told."""


@final
class State:
    """The file of one tracker of one run.

    One process has it at a time: a resumed run begins where the process of the run before, which
    may still be writing, ends.

    Args:
        file: It; its folder is there.
    """

    def __init__(self, file: Path) -> None:
        """Wait until nobody else has it."""
        self._file = file
        self._lock = file.with_suffix(".lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def read(self) -> Progress:
        """Return how far the tracker is; nothing where there is no file, or a damaged one."""
        try:
            data: Any = json.loads(self._file.read_bytes())
            step, part = data["place"]
            return Progress(str(data["id"]), (int(step), int(part)))
        except (OSError, ValueError, TypeError, KeyError):
            return Progress()

    def keep(self, progress: Progress) -> None:
        """Write how far the tracker is.

        Raises:
            RunReplaced: The folder is that of another run by now.
        """
        try:
            now = self._file.with_suffix(".lock").stat()
        except FileNotFoundError:
            raise RunReplaced(f"{self._file.parent} has been removed") from None
        if now.st_ino != os.fstat(self._lock.fileno()).st_ino:
            raise RunReplaced(f"{self._file.parent} belongs to another run")
        new = self._file.with_name(f".{self._file.name}.tmp")
        new.write_text(json.dumps({"id": progress.id, "place": progress.place}) + "\n")
        new.replace(self._file)

    def close(self) -> None:
        """Let the next process have it."""
        self._lock.close()


@final
class NoState:
    """Nothing is remembered where there is no run folder."""

    def read(self) -> Progress:
        """Return that nothing is written yet."""
        return Progress()

    def keep(self, progress: Progress) -> None:
        """Forget it."""
        del progress

    def close(self) -> None:
        """Nothing was opened."""
