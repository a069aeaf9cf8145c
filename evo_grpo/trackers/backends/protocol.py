"""What the process of a tracker asks of the package that it writes with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from evo_grpo.trackers.told import Beginning, Entry


@dataclass(frozen=True)
class Progress:
    """How far a tracker is with a run.

    Attributes:
        id: What the tracker calls the run, empty before it has begun.
        place: Of the last entry that it has; (0, 0) before the first.
    """

    id: str = ""
    place: tuple[int, int] = (0, 0)


class Backend(Protocol):
    """Writes the entries of one run; `tests/helpers/tracker_contract.py` tests it."""

    def begin(self, beginning: Beginning, so_far: Progress) -> str:
        """Begin a run, or go on with one.

        Args:
            beginning: What the run is.
            so_far: How far it is; without an id it is a new one.

        Returns:
            The id by which it goes on later.
        """
        ...

    def log(self, entry: Entry) -> None:
        """Write an entry, whose place is after all that were written."""
        ...

    def end(self) -> None:
        """Write what is left; nothing follows."""
        ...
