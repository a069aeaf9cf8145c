"""The trackers that the settings of a run ask for."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from evo_grpo.record.observer import Observer, Several
from evo_grpo.settings import RecordConfig
from evo_grpo.trackers.tracker import Trackers


@contextmanager
def with_trackers(record: RecordConfig, observer: Observer, *, rank: int) -> Generator[Observer]:
    """Follow a run with its trackers too.

    Args:
        record: What the run keeps.
        observer: Who else follows it.
        rank: Of this process; the first one alone tells trackers.

    Yields:
        All of them as one observer.

    Raises:
        EngineUnavailable: The package of one is not installed.
    """
    if not record.trackers or rank:
        yield observer
        return
    with Trackers(record.trackers) as trackers:
        yield Several([observer, trackers])
