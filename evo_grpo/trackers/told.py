"""What is told to a tracker: plain values that JSON can hold, between a run and a process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

POPULATION = "population"
"""Who the values of no single agent belong to."""


@dataclass(frozen=True)
class Entry:
    """What happened at one time.

    Attributes:
        step: GRPO steps taken by then, from 1.
        part: 0 for a step, 1 for the end of its round, 2 for the end of the run; with the step, the
            place of the entry among all.
        values: By who it is about (`agent-03` or `population`), then by the name of the metric;
            finite numbers alone.
        texts: By who it is about.
    """

    step: int
    part: int
    values: Mapping[str, Mapping[str, float]]
    texts: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def place(self) -> tuple[int, int]:
        """Where it stands among all entries of a run."""
        return self.step, self.part

    @cached_property
    def line(self) -> str:
        """It as a line of JSON, made once for all trackers that are told it."""
        told = {"step": self.step, "part": self.part, "values": self.values, "texts": self.texts}
        return json.dumps(told) + "\n"


def entry_from_json(data: Mapping[str, Any]) -> Entry:
    """Return the entry of a line of JSON that was read."""
    return Entry(data["step"], data["part"], data["values"], data["texts"])


@dataclass(frozen=True)
class Beginning:
    """What a tracker is told first.

    Attributes:
        kind: Of the tracker.
        name: Of the run, as the tracker is to call it.
        project: To which it belongs.
        folder: Where the tracker may write; None for nowhere.
        state: File in which the tracker remembers how far it is, None for none.
        settings: The run's settings, by path.
        online: Send to the service.
        server: Where it is sent, None for the tracker's own or for none.
        patience: Seconds that its process may take to write what it has, once nothing more comes.
    """

    kind: str
    name: str
    project: str
    folder: str | None
    state: str | None
    settings: Mapping[str, str | float | None]
    online: bool = False
    server: str | None = None
    patience: float = 600.0

    @property
    def line(self) -> str:
        """It as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"


def side_by_side(entry: Entry) -> dict[str, float]:
    """Return the values of an entry under names that put the agents of a metric in one chart.

    For trackers that sort charts by the part of a name before the slash: `reward/agent-03`, and for
    the population the name alone.
    """
    return {
        name if who == POPULATION else f"{name}/{who}": value
        for who, values in entry.values.items()
        for name, value in values.items()
    }
