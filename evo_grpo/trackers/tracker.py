"""An observer that tells a tracker, without making the run wait for it."""

from __future__ import annotations

import logging
import queue
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from evo_grpo.errors import ConfigError
from evo_grpo.printable import raised
from evo_grpo.record.names import TRACKERS
from evo_grpo.record.observer import Observer
from evo_grpo.settings.trackers import TrackerConfig, check_trackers
from evo_grpo.trackers.entries import end_entry, round_entry, step_entry
from evo_grpo.trackers.outlets import AccelerateOutlet, Outlet, ProcessOutlet, TrackerFailed
from evo_grpo.trackers.told import Beginning, Entry
from evo_grpo.validation import shown

if TYPE_CHECKING:
    from evo_grpo.record.records import RoundRecord
    from evo_grpo.types import Slot

WAITING = 256
"""Entries that may wait for a tracker; what comes while it is that far behind is left out."""
SECONDS_TO_FINISH = 60.0
"""So long the end of a run waits for a tracker to write what it has."""
SECONDS_TO_STOP = 4.0
"""So long a run that is stopped waits, which has to be over within nine seconds."""
PATIENCE = 600.0
"""So many seconds more a tracker's process may then go on by itself."""
PROJECT = "evo-grpo"

_log = logging.getLogger(__name__)


class Tracker(Observer):
    """Follows runs and tells a tracker of them, one run after the other.

    What it is told waits in a queue for a thread, so that no run waits for it. A tracker that fails
    is left with one warning; one that is too slow misses entries, which is a warning too. Use it in
    a `with` block, or call `close`, where runs may be interrupted.

    For example:

        with Tracker("tensorboard", folder="boards") as tracker:
            population.train("sums", observer=tracker)

    Args:
        kind: "tensorboard", "wandb", "trackio" or "mlflow"; or an object with the methods of
            `accelerate.tracking.GeneralTracker`, for all others.
        **options: Of `record.trackers`: project, name, folder, online, server. Without a folder it
            writes below the run folder, or below the current one where nothing else is written.

    Raises:
        ConfigError: An unknown kind or option, or an object that is no tracker.
        EngineUnavailable: Its package is not installed.
    """

    def __init__(self, kind: Any, **options: Any) -> None:  # noqa: ANN401 -- a name, or an object
        self._config: TrackerConfig | None = None
        self._object: Any = None
        if isinstance(kind, str):
            given: dict[str, Any] = {"kind": kind, **options}
            self._config = TrackerConfig(**given)
            check_trackers([self._config])
            self.kind = kind
        else:
            _check_object(kind, options)
            self._object, self.kind = kind, str(getattr(kind, "name", type(kind).__name__))
        self._steps_per_round: int | None = None
        self._steps = 0
        self._queue: queue.Queue[Entry | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._outlet: Outlet | None = None
        self._failed = ""
        self._missed = 0

    def __enter__(self) -> Self:
        """Return the tracker."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it; after an error it is waited for only briefly."""
        self.close(stopped=error is not None)

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """See `Observer`."""
        goes_on = run_dir is None and first_round > 0 and self._thread is not None
        if goes_on:
            return
        self.close()
        steps = getattr(getattr(settings, "population", None), "steps_per_round", None)
        self._steps_per_round = steps
        self._steps = first_round * (steps or 0)
        self._failed, self._missed = "", 0
        beginning = self._beginning(run_dir, settings)
        self._queue = queue.Queue(WAITING)
        self._outlet = ProcessOutlet() if self._object is None else AccelerateOutlet(self._object)
        # A daemon: a tracker that does not answer must not keep the process from its end.
        self._thread = threading.Thread(
            target=self._work,
            args=(self._outlet, self._queue, beginning),
            name=f"tracker-{self.kind}",
            daemon=True,
        )
        self._thread.start()

    def step_done(self, round: int, step: int, metrics: Mapping[Slot, Mapping[str, float]]) -> None:
        """See `Observer`."""
        per_round = self._steps_per_round
        self._steps = self._steps + 1 if per_round is None else round * per_round + step + 1
        self._put(step_entry(self._steps, metrics))

    def round_done(self, record: RoundRecord) -> None:
        """See `Observer`."""
        self._put(round_entry(self._steps, record))

    def finished(self, summary: Mapping[str, Any]) -> None:
        """See `Observer`."""
        self._put(end_entry(self._steps, summary))
        self.close()

    def close(self, *, stopped: bool = False) -> None:
        """Write what is waiting, and end; a tracker that takes too long is left.

        Args:
            stopped: Wait for `SECONDS_TO_STOP` alone; its process may take longer.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        seconds = SECONDS_TO_STOP if stopped else SECONDS_TO_FINISH
        until = time.monotonic() + seconds
        with suppress(queue.Full):  # then it is given up below
            self._queue.put(None, timeout=seconds)
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            assert self._outlet is not None, "made with the thread"
            if not self._outlet.leave():
                self._failed = f"it has not written all within {seconds:g} s"
                thread.join(1.0)
            elif not stopped:
                self._failed = f"it is still writing after {seconds:g} s, in its own process"
        if self._failed or self._missed:
            self._warn()

    def _beginning(self, run_dir: Path | None, settings: object) -> Beginning:
        config = self._config
        name = None if config is None else config.name
        project = None if config is None else config.project
        where = None if run_dir is None else run_dir.resolve()
        title = name or (time.strftime("run-%Y%m%d-%H%M%S") if where is None else where.name)
        state = folder = None
        if where is not None and config is not None:
            state = str(where / TRACKERS / f"{self.kind}.json")
        if config is not None:
            folder = _folder(config, where, title)
        return Beginning(
            kind=self.kind,
            name=title,
            project=project or PROJECT,
            folder=folder,
            state=state,
            settings=_flat(settings),
            online=config is not None and config.online,
            server=None if config is None else config.server,
            patience=PATIENCE,
        )

    def _put(self, entry: Entry) -> None:
        if self._thread is None:
            return
        if self._failed:
            self._thread = None
            self._warn()
            return
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self._missed += 1

    def _warn(self) -> None:
        """Warn once of what went wrong; on the thread that trains."""
        why = self._failed or f"it was too slow, and misses {self._missed} entries"
        self._failed, self._missed = "", 0
        warnings.warn(
            f"tracker {self.kind}: {why}; the run goes on, and its own files have everything",
            UserWarning,
            stacklevel=3,
        )

    def _work(
        self, outlet: Outlet, entries: queue.Queue[Entry | None], beginning: Beginning
    ) -> None:
        try:
            outlet.begin(beginning)
            while (entry := entries.get()) is not None:
                outlet.log(entry)
            outlet.end()
        except TrackerFailed as error:
            self._failed = self._failed or str(error)
        except Exception as error:  # whatever a tracker raises: the run goes on without it
            _log.exception("tracker %s", self.kind)
            self._failed = self._failed or raised(error)


def _check_object(tracker: Any, options: Mapping[str, Any]) -> None:  # noqa: ANN401 -- any object
    methods = ("store_init_configuration", "log", "finish")
    missing = [name for name in methods if not callable(getattr(tracker, name, None))]
    if missing:
        raise ConfigError(
            f"tracker: expected 'tensorboard', 'wandb', 'trackio', 'mlflow' or an object like "
            f"accelerate.tracking.GeneralTracker, got {shown(tracker)} without {', '.join(missing)}"
        )
    if options:
        raise ConfigError(
            f"tracker: expected no options beside an object, got {', '.join(options)}; set them "
            "where the object is made"
        )


def _folder(config: TrackerConfig, run_dir: Path | None, title: str) -> str:
    if config.folder is None and run_dir is not None:
        return str(run_dir / TRACKERS / config.kind)
    folder = Path(config.folder or f"{TRACKERS}/{config.kind}").expanduser().resolve()
    # TensorBoard knows a run by its folder; the others keep their runs apart in what they write.
    return str(folder / title if config.kind == "tensorboard" else folder)


def _flat(settings: object) -> dict[str, str | float | None]:
    """Return settings by path, as trackers show them."""
    dump = getattr(settings, "model_dump", None)
    found: dict[str, str | float | None] = {}

    def add(path: str, value: Any) -> None:  # noqa: ANN401 -- plain values
        if isinstance(value, Mapping):
            for name, inner in value.items():
                add(f"{path}.{name}" if path else str(name), inner)
        elif isinstance(value, list | tuple):
            found[path] = ", ".join(map(str, value))
        else:
            found[path] = value if value is None or isinstance(value, int | float) else str(value)

    if callable(dump):
        add("", dump(mode="json"))
    return found
