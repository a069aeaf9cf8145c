"""`evo_grpo.Tracker`: a tracker as an observer, for training that has no run folder."""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

from evo_grpo.errors import ConfigError
from evo_grpo.printable import raised
from evo_grpo.readers.trackers.base import flat_settings, open_tracker
from evo_grpo.readers.trackers.values import values_of
from evo_grpo.record.log import Entry, RoundDone, RunFinished, StepDone
from evo_grpo.record.observer import Observer
from evo_grpo.schema.validation import shown
from evo_grpo.settings.trackers import KINDS, TrackerConfig, check_trackers

if TYPE_CHECKING:
    from evo_grpo.readers.reader import Reader
    from evo_grpo.record.records import RoundRecord
    from evo_grpo.types import Slot

WAITING = 256
"""Entries that may wait for a tracker; what comes while it is that far behind is left out."""
SECONDS_TO_FINISH = 60.0
"""How long the end of training waits for the tracker."""
SECONDS_TO_STOP = 4.0
"""How long training that was interrupted waits for the tracker."""


class Tracker(Observer):
    """Follows training and writes it to a tracker, in a thread of this process.

    A run with a folder needs none: `record.trackers` names its trackers, which read the log of the
    run in a process of their own. A tracker that fails is left with one warning; one that is too
    slow misses entries, which is a warning too.

    For example:

        with Tracker("tensorboard", folder="boards") as tracker:
            population.train("sums", observer=tracker)

    Args:
        kind: A kind of `record.trackers`, such as "tensorboard"; or an object with the methods of
            `accelerate.tracking.GeneralTracker`.
        **options: Of `record.trackers`: project, name, folder, online, server. Without a folder it
            writes below the run folder, or below the current one where nothing else is written.

    Raises:
        ConfigError: An unknown kind or option, or an object that is no tracker.
        EngineUnavailable: Its package is not installed.
    """

    def __init__(self, kind: Any, **options: Any) -> None:  # noqa: ANN401 -- a name, or an object
        self._make: Callable[[Path | None, object], Reader]
        if isinstance(kind, str):
            config = TrackerConfig(kind=kind, **options)
            check_trackers([config])
            self.kind = kind
            self._make = lambda run, settings: open_tracker(config, run, settings, "")
        else:
            _check_object(kind, options)
            self.kind = str(getattr(kind, "name", type(kind).__name__))
            self._make = lambda run, settings: _AccelerateReader(kind, settings)
        self._steps_per_round: int | None = None
        self._steps = 0
        self._writing: _Writing | None = None

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it; after an error the tracker is waited for only briefly."""
        self.close(stopped=error is not None)

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """See `Observer`."""
        if run_dir is None and first_round > 0 and self._writing is not None:
            return  # a further call of the same population
        self.close()
        steps = getattr(getattr(settings, "population", None), "steps_per_round", None)
        self._steps_per_round = steps
        self._steps = first_round * (steps or 0)
        self._writing = _Writing(self.kind, lambda: self._make(run_dir, settings))

    def step_done(self, round: int, step: int, metrics: Mapping[Slot, Mapping[str, float]]) -> None:
        """See `Observer`."""
        per_round = self._steps_per_round
        self._steps = self._steps + 1 if per_round is None else round * per_round + step + 1
        self._put(StepDone(round, step, self._steps, metrics))

    def round_done(self, record: RoundRecord) -> None:
        """See `Observer`."""
        self._put(RoundDone(self._steps, record))

    def finished(self, summary: Mapping[str, Any]) -> None:
        """See `Observer`."""
        self._put(RunFinished(self._steps, summary))
        self.close()

    def close(self, *, stopped: bool = False) -> None:
        """Write what is waiting, and end; a tracker that takes too long is left.

        Args:
            stopped: Wait for `SECONDS_TO_STOP` alone.
        """
        if self._writing is not None:
            self._writing.end(SECONDS_TO_STOP if stopped else SECONDS_TO_FINISH)
            self._writing = None

    def _put(self, entry: Entry) -> None:
        if self._writing is not None and not self._writing.put(entry):
            self.close()


@final
class _Writing:
    """A thread that writes entries to a tracker, so that training does not wait for it.

    Args:
        kind: Of the tracker, for warnings.
        make: Makes its reader, in the thread.
    """

    def __init__(self, kind: str, make: Callable[[], Reader]) -> None:
        self._kind = kind
        self._make = make
        self._entries: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._failed = ""
        self._missed = 0
        # A daemon: a tracker that does not answer must not keep the process from its end.
        self._thread = threading.Thread(target=self._write, name=f"tracker-{kind}", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> bool:
        """Take an entry without waiting; returns False once the tracker has failed."""
        if self._entries.qsize() < WAITING:
            self._entries.put(entry)
        else:
            self._missed += 1
        return not self._failed

    def end(self, seconds: float) -> None:
        """Wait until all is written, then warn of what went wrong."""
        self._entries.put(None)
        until = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < until:
            self._thread.join(0.1)
        why = self._failed
        if not why and self._thread.is_alive():
            why = f"it has not written all within {seconds:g} s"
        if not why and self._missed:
            why = f"it was too slow, and misses {self._missed} entries"
        if why:
            warnings.warn(
                f"tracker {self._kind}: {why}; training goes on without it",
                UserWarning,
                stacklevel=4,
            )

    def _write(self) -> None:
        try:
            reader = self._make()
            while (entry := self._entries.get()) is not None:
                reader.read(entry)
            reader.close()
        except BaseException as error:  # whatever a tracker raises: training goes on without it
            self._failed = raised(error)


@final
class _AccelerateReader:
    """One of accelerate's trackers, or another of that interface, made by the user.

    Args:
        tracker: An `accelerate.tracking.GeneralTracker`.
        settings: Of the run.
    """

    id = ""

    def __init__(self, tracker: Any, settings: object) -> None:  # noqa: ANN401 -- by its methods
        self._tracker = tracker
        start = getattr(tracker, "start", None)
        if callable(start):
            start()
        tracker.store_init_configuration(flat_settings(settings))

    def read(self, entry: Entry) -> None:
        """See `Reader`."""
        written = values_of(entry)
        if written is not None and (values := written.side_by_side()):
            self._tracker.log(values, step=written.step)

    def flush(self) -> bool:
        """See `Reader`."""
        return True

    def close(self) -> None:
        """See `Reader`."""
        self._tracker.finish()


def _check_object(tracker: Any, options: Mapping[str, Any]) -> None:  # noqa: ANN401 -- any object
    methods = ("store_init_configuration", "log", "finish")
    missing = [name for name in methods if not callable(getattr(tracker, name, None))]
    if missing:
        raise ConfigError(
            f"tracker: expected {', '.join(map(repr, KINDS))} or an object like "
            f"accelerate.tracking.GeneralTracker, got {shown(tracker)} without {', '.join(missing)}"
        )
    if options:
        raise ConfigError(
            f"tracker: expected no options beside an object, got {', '.join(options)}; set "
            "them where the object is made"
        )
