"""Observers that tell trackers, without making the run wait for them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from evo_grpo.errors import ConfigError
from evo_grpo.record.names import TRACKERS
from evo_grpo.record.observer import Observer
from evo_grpo.settings.trackers import TrackerConfig, check_trackers
from evo_grpo.trackers.channel import Channel
from evo_grpo.trackers.entries import end_entry, round_entry, step_entry
from evo_grpo.trackers.outlets import AccelerateOutlet, ProcessOutlet
from evo_grpo.trackers.told import Beginning, Entry
from evo_grpo.validation import shown

if TYPE_CHECKING:
    from evo_grpo.record.records import RoundRecord
    from evo_grpo.types import Slot

SECONDS_TO_FINISH = 60.0
"""So long the end of a run waits for trackers to write what they have."""
SECONDS_TO_STOP = 4.0
"""So long a run that is stopped waits, which has to be over within nine seconds."""
PATIENCE = 600.0
"""So many seconds more a tracker's process may then go on by itself."""
PROJECT = "evo-grpo"


class Trackers(Observer):
    """Follows runs and tells several trackers of them, one run after the other.

    What they are told is put into words once, and waits in a queue for a thread of each tracker, so
    that no run waits for it. A tracker that fails is left with one warning; one that is too slow
    misses entries, which is a warning too. Use it in a `with` block, or call `close`, where runs
    may be interrupted.

    Args:
        trackers: Settings of trackers; for others an object with the methods of
            `accelerate.tracking.GeneralTracker`.

    Raises:
        ConfigError: An object that is no tracker.
        EngineUnavailable: The package of one is not installed.
    """

    def __init__(self, trackers: Sequence[Any]) -> None:
        configs = [one for one in trackers if isinstance(one, TrackerConfig)]
        check_trackers(configs)
        for one in trackers:
            if not isinstance(one, TrackerConfig):
                _check_object(one)
        self._trackers = tuple(trackers)
        self._steps_per_round: int | None = None
        self._steps = 0
        self._channels: list[Channel] = []

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it; after an error the trackers are waited for only briefly."""
        self.close(stopped=error is not None)

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """See `Observer`."""
        goes_on = run_dir is None and first_round > 0 and bool(self._channels)
        if goes_on:
            return
        self.close()
        steps = getattr(getattr(settings, "population", None), "steps_per_round", None)
        self._steps_per_round = steps
        self._steps = first_round * (steps or 0)
        values = _flat(settings)
        for tracker in self._trackers:
            outlet = ProcessOutlet()
            if not isinstance(tracker, TrackerConfig):
                outlet = AccelerateOutlet(tracker)
            beginning = _beginning(tracker, run_dir, values)
            self._channels.append(Channel(beginning.kind, outlet, beginning))

    def step_done(self, round: int, step: int, metrics: Mapping[Slot, Mapping[str, float]]) -> None:
        """See `Observer`."""
        per_round = self._steps_per_round
        self._steps = self._steps + 1 if per_round is None else round * per_round + step + 1
        if self._channels:
            self._put(step_entry(self._steps, metrics))

    def round_done(self, record: RoundRecord) -> None:
        """See `Observer`."""
        # At once: a resume plays the rounds again that were not recorded, and no others.
        if self._channels:
            self._put(round_entry(self._steps, record), soon=True)

    def finished(self, summary: Mapping[str, Any]) -> None:
        """See `Observer`."""
        self._put(end_entry(self._steps, summary))
        self.close()

    def close(self, *, stopped: bool = False) -> None:
        """Write what is waiting, and end; a tracker that takes too long is left.

        Args:
            stopped: Wait for `SECONDS_TO_STOP` alone; its process may take longer.
        """
        for channel in self._channels:
            channel.end()
        seconds = SECONDS_TO_STOP if stopped else SECONDS_TO_FINISH
        until = time.monotonic() + seconds
        ended: list[Channel] = []
        try:
            # One by one: where Ctrl-C ends the wait, those that are left are closed once more.
            while self._channels:
                self._channels[0].wait(until, seconds, stopped=stopped)
                ended.append(self._channels.pop(0))
        finally:
            _warn(ended)

    def _put(self, entry: Entry, *, soon: bool = False) -> None:
        failed = [channel for channel in self._channels if channel.failed]
        self._channels = [channel for channel in self._channels if channel not in failed]
        for channel in self._channels:
            channel.put(entry, soon=soon)
        _warn(failed)


class Tracker(Trackers):
    """Follows runs and tells a tracker of them, one run after the other; see `Trackers`.

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
        tracker: Any = kind
        if isinstance(kind, str):
            given: dict[str, Any] = {"kind": kind, **options}
            tracker = TrackerConfig(**given)
        else:
            _check_object(kind)
        if options and not isinstance(kind, str):
            raise ConfigError(
                f"tracker: expected no options beside an object, got {', '.join(options)}; set "
                "them where the object is made"
            )
        super().__init__([tracker])
        self.kind = _kind(tracker)


def _warn(channels: Sequence[Channel]) -> None:
    """Warn once of what went wrong; on the thread that trains."""
    for channel in channels:
        if channel.trouble:
            warnings.warn(channel.trouble, UserWarning, stacklevel=4)


def _kind(tracker: Any) -> str:  # noqa: ANN401 -- a configuration, or any object
    if isinstance(tracker, TrackerConfig):
        return tracker.kind
    return str(getattr(tracker, "name", type(tracker).__name__))


def _check_object(tracker: Any) -> None:  # noqa: ANN401 -- any object
    methods = ("store_init_configuration", "log", "finish")
    missing = [name for name in methods if not callable(getattr(tracker, name, None))]
    if missing:
        raise ConfigError(
            f"tracker: expected 'tensorboard', 'wandb', 'trackio', 'mlflow' or an object like "
            f"accelerate.tracking.GeneralTracker, got {shown(tracker)} without {', '.join(missing)}"
        )


def _beginning(
    tracker: Any,  # noqa: ANN401 -- a configuration, or an object
    run_dir: Path | None,
    values: Mapping[str, str | float | None],
) -> Beginning:
    config = tracker if isinstance(tracker, TrackerConfig) else None
    where = None if run_dir is None else run_dir.resolve()
    title = time.strftime("run-%Y%m%d-%H%M%S") if where is None else where.name
    kind = _kind(tracker)
    if config is None:
        return Beginning(kind, title, PROJECT, None, None, values, patience=PATIENCE)
    title = config.name or title
    return Beginning(
        kind=kind,
        name=title,
        project=config.project or PROJECT,
        folder=_folder(config, where, title),
        state=None if where is None else str(where / TRACKERS / f"{kind}.json"),
        settings=values,
        online=config.online,
        server=config.server,
        patience=PATIENCE,
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
