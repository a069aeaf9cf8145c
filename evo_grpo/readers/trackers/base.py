"""The base class of trackers. Each tracker is a reader of the log in a module named after its kind.

A new tracker needs such a module with a class `Writer`, a line in
`evo_grpo.settings.trackers.KINDS` and an extra in pyproject.toml.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from evo_grpo.readers.trackers.values import Values, values_of
from evo_grpo.record.log import Entry
from evo_grpo.record.names import TRACKERS
from evo_grpo.record.plain import refuse_links
from evo_grpo.settings.prompting import without_rows
from evo_grpo.settings.trackers import TrackerConfig, check_trackers
from evo_grpo.training.inputs.recorded_inputs import flat

if TYPE_CHECKING:
    from evo_grpo.readers.reader import Reader

PROJECT = "evo-grpo"
Settings = dict[str, str | float | None]
"""The settings of a run, by path."""


class TrackerReader(ABC):
    """Writes the entries of a run to a tracker; see `evo_grpo.readers.reader.Reader`.

    A tracker whose run has the methods `log` and `finish` has nothing to add but `open`.

    Attributes:
        environment: Default values of environment variables of the tracker's package.
        makes_links: Whether the package creates links in its folder.
    """

    environment: ClassVar[Mapping[str, str]] = {}
    makes_links: ClassVar[bool] = False
    run: Any

    def __init__(self, target: TrackerConfig, settings: Settings, id: str) -> None:
        self.id = self.open(target, settings, id)

    @abstractmethod
    def open(self, target: TrackerConfig, settings: Settings, id: str) -> str:
        """Start a run, or continue one.

        Args:
            target: Where the run goes: project, name and folder, which exists, are known.
            settings: The settings of the run.
            id: Id of the run to continue, empty for a new run.

        Returns:
            The id for continuing the run later.
        """

    def write(self, values: Values) -> None:
        """Write the values of a step."""
        self.run.log(values.with_texts(), step=values.step)

    def read(self, entry: Entry) -> None:
        """Write an entry of the log."""
        values = values_of(entry)
        if values is not None:
            self.write(values)

    def flush(self) -> bool:
        """Return whether the written values survive a kill of this process.

        False for packages that write in another thread or process. The cursor of the reader is then
        saved only when the reader is closed; after a kill, the values are written again.
        """
        return False

    def close(self) -> None:
        """Write the remaining values and end the run."""
        self.run.finish()


def open_tracker(config: TrackerConfig, run: Path | None, settings: object, id: str) -> Reader:
    """Construct the reader of a tracker for a run with these settings.

    `run` is None for training without a run folder, and `id` is empty for a new run.

    Raises:
        EngineUnavailable: The package of the tracker is not installed.
    """
    check_trackers([config])
    # Without a run folder, the time is the name, so that TensorBoard does not mix two runs.
    unnamed = time.strftime("run-%Y%m%d-%H%M%S") if run is None else run.resolve().name
    name, in_run = config.name or unnamed, config.folder is None and run is not None
    if config.folder is None and run is not None:
        folder = run.resolve() / TRACKERS / config.kind
    else:
        folder = Path(config.folder or f"{TRACKERS}/{config.kind}").expanduser().resolve()
        if config.kind == "tensorboard":  # which identifies a run by its folder
            folder /= name
    made: type[TrackerReader] = import_module(f"{__package__}.{config.kind}").Writer
    for variable, value in made.environment.items():
        os.environ.setdefault(variable, value)
    if in_run and not made.makes_links:  # the contents of a run folder are not trusted
        refuse_links(folder)
    folder.mkdir(parents=True, exist_ok=True)
    known = {"project": config.project or PROJECT, "name": name, "folder": str(folder)}
    return made(config.model_copy(update=known), flat_settings(settings), id)


def flat_settings(settings: object) -> Settings:
    """Return settings as a mapping from path to value for trackers; empty without settings.

    Rows of the user that stand in the settings are counted: a tracker may send them away.
    """
    dump = getattr(settings, "model_dump", None)
    found: Settings = {}
    values = cast("dict[str, Any]", dump(mode="json")) if callable(dump) else {}
    for path, value in flat(without_rows(values)):
        if isinstance(value, list):
            found[path] = ", ".join(map(str, cast("list[object]", value)))
        elif value != {}:
            found[path] = value if value is None or isinstance(value, int | float) else str(value)
    return found
