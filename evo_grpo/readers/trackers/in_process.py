"""Defines `evo_grpo.Tracker`, an observer for training without a run folder."""

import queue
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, final

from evo_grpo.errors import ConfigError
from evo_grpo.escaping import error_text
from evo_grpo.readers.reader import Reader
from evo_grpo.readers.trackers import base
from evo_grpo.record.log import Entry, RoundDone, RunFinished, StepDone
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord
from evo_grpo.schema.validation import shown
from evo_grpo.settings.trackers import KINDS, TrackerConfig, check_trackers
from evo_grpo.types import Slot

WAITING = 256
"""Greatest length of the queue of entries; further entries are dropped while it is full."""
SECONDS_TO_FINISH = 60.0
"""How long the end of training waits for the tracker."""
SECONDS_TO_STOP = 4.0
"""How long interrupted training waits for the tracker."""


class Tracker(Observer):
    """An observer that writes training to a tracker, in a thread of this process.

    A run with a folder does not need a `Tracker`: the trackers in `record.trackers` read the log of
    the run in another process. A tracker that fails is dropped, and a tracker that is too slow
    misses entries; both cause a warning.

    For example:

        with Tracker("tensorboard", folder="boards") as tracker:
            population.train("sums", observer=tracker)

    Args:
        kind: A kind of `record.trackers`, such as "tensorboard"; or an object with the methods of
            `accelerate.tracking.GeneralTracker`.
        **options: Options of `record.trackers`: project, name, folder, online, server. The default
            folder is in the run folder, or in the current folder if there is no run folder.

    Raises:
        ConfigError: The kind or an option is unknown, or the object is not a tracker.
        EngineUnavailable: The package of the tracker is not installed.
    """

    def __init__(self, kind: Any, **options: Any) -> None:  # noqa: ANN401 -- a name, or an object
        self._make: Callable[[Path | None, object], Reader]
        if isinstance(kind, str):
            config = TrackerConfig(kind=kind, **options)
            check_trackers([config])
            self.kind = kind
            self._make = lambda run, settings: base.open_tracker(config, run, settings, "")
        else:
            _check_object(kind, options)
            self.kind = str(getattr(kind, "name", type(kind).__name__))
            self._make = lambda run, settings: _AccelerateReader(kind, settings)
        self._steps_per_round: int | None = None
        self._steps = 0
        self._writing: _Writing | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the tracker; after an error, wait for `SECONDS_TO_STOP` only."""
        self.close(stopped=error is not None)

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """See `Observer`."""
        if run_dir is None and first_round > 0 and self._writing is not None:
            return  # another call of `train` of the same population
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
        """Write queued entries and close the tracker; give up after a while, soon if `stopped`."""
        if self._writing is not None:
            self._writing.end(SECONDS_TO_STOP if stopped else SECONDS_TO_FINISH)
            self._writing = None

    def _put(self, entry: Entry) -> None:
        if self._writing is not None and not self._writing.put(entry):
            self.close()


@final
class _Writing:
    """A thread that writes entries to a tracker, so that training does not wait for it.

    `kind` is named in warnings; `make` constructs the reader in the thread.
    """

    def __init__(self, kind: str, make: Callable[[], Reader]) -> None:
        self._kind = kind
        self._make = make
        self._entries: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._failed = ""
        self._missed = 0
        # A daemon thread: the process can end although a tracker hangs.
        self._thread = threading.Thread(target=self._write, name=f"tracker-{kind}", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> bool:
        """Queue an entry without waiting; return False if the tracker has failed."""
        if self._entries.qsize() < WAITING:
            self._entries.put(entry)
        else:
            self._missed += 1
        return not self._failed

    def end(self, seconds: float) -> None:
        """Wait for the thread, at most `seconds`; warn if the tracker failed or missed entries."""
        self._entries.put(None)
        self._thread.join(seconds)
        reason = self._failed
        if not reason and self._thread.is_alive():
            reason = f"it has not written all entries within {seconds:g} s"
        if not reason and self._missed:
            reason = f"it was too slow and missed {self._missed} entries"
        if reason:
            warnings.warn(
                f"tracker {self._kind}: {reason}; training continues without it",
                UserWarning,
                stacklevel=4,
            )

    def _write(self) -> None:
        try:
            reader = self._make()
            while (entry := self._entries.get()) is not None:
                reader.read(entry)
            reader.close()
        except BaseException as error:  # any error of a tracker: training continues without it
            self._failed = error_text(error)


@final
class _AccelerateReader(base.TrackerReader):
    """Writes to an `accelerate.tracking.GeneralTracker`, or an object with its methods."""

    def __init__(self, tracker: Any, settings: object) -> None:  # noqa: ANN401 -- by its methods
        self.run = tracker
        super().__init__(TrackerConfig.model_construct(), base.flat_settings(settings), "")

    def open(self, target: TrackerConfig, settings: base.Settings, id: str) -> str:
        if callable(start := getattr(self.run, "start", None)):
            start()
        self.run.store_init_configuration(settings)
        return ""

    def write(self, values: base.Values) -> None:
        """Log the numbers of a step, without texts."""
        if row := values.by_name():
            self.run.log(row, step=values.step)


def _check_object(tracker: Any, options: Mapping[str, Any]) -> None:  # noqa: ANN401 -- any object
    methods = ("store_init_configuration", "log", "finish")
    missing = [name for name in methods if not callable(getattr(tracker, name, None))]
    if missing or options:
        without = f"without {', '.join(missing)}" if missing else f"beside {', '.join(options)}"
        raise ConfigError(
            f"tracker: expected {', '.join(map(repr, KINDS))}, or an object like "
            "accelerate.tracking.GeneralTracker and no options, got "
            f"{shown(tracker)} {without}"
        )
