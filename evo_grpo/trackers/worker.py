"""The process of one tracker: entries come as lines of JSON, the package writes them.

In a process of its own, since these packages keep global state, print, read the environment when
they are imported, and take processor time that training would wait for in one interpreter. It ends
at the end of its input, also where whoever wrote that was killed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from evo_grpo.printable import raised
from evo_grpo.trackers.backends.protocol import Backend, Progress
from evo_grpo.trackers.backends.registry import backend, environment
from evo_grpo.trackers.told import Beginning, entry_from_json


def main() -> int:
    """Write what comes in; returns 1 after a failure, which it tells in its output."""
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what packages print goes with what they complain of
    try:
        write_all(sys.stdin)
    except Exception as error:  # whatever a package raises: the run is told, and goes on
        told.write(json.dumps({"failed": raised(error)}) + "\n")
        told.flush()
        raise
    told.write(json.dumps({"done": True}) + "\n")
    told.flush()
    return 0


def write_all(lines: TextIO) -> None:
    """Write entries to a tracker.

    Args:
        lines: A beginning, then entries, then null. A process that was forked from the run may hold
            the other end open, so its end alone would not do.
    """
    first = lines.readline()
    if not first:
        return
    beginning = Beginning(**json.loads(first))
    for name, value in environment(beginning).items():
        os.environ.setdefault(name, value)
    state = None if beginning.state is None else Path(beginning.state)
    so_far = Progress() if state is None else read_progress(state)
    written: Backend = backend(beginning.kind)
    so_far = Progress(written.begin(beginning, so_far), so_far.place)
    _keep(state, so_far)
    for line in lines:
        data = json.loads(line)
        if data is None:
            break
        entry = entry_from_json(data)
        # A round that was interrupted is played again, to the same bits.
        if entry.place > so_far.place:
            written.log(entry)
            so_far = Progress(so_far.id, entry.place)
            _keep(state, so_far)
    written.end()


def read_progress(state: Path) -> Progress:
    """Return how far a tracker is, from its file; nothing where there is none or it is damaged."""
    try:
        data: Any = json.loads(state.read_bytes())
        step, part = data["place"]
        return Progress(str(data["id"]), (int(step), int(part)))
    except (OSError, ValueError, TypeError, KeyError):
        return Progress()


def _keep(state: Path | None, so_far: Progress) -> None:
    if state is None:
        return
    new = state.with_name(f".{state.name}.tmp")
    new.write_text(json.dumps({"id": so_far.id, "place": so_far.place}) + "\n")
    new.replace(state)


if __name__ == "__main__":
    sys.exit(main())
