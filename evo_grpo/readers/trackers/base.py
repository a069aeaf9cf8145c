"""The base class of trackers. Each tracker is a reader of the log in a module named after its kind.

A new tracker needs such a module with a class `Writer`, a line in
`evo_grpo.settings.trackers.KINDS` and an extra in pyproject.toml.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Target:
    """The destination of a run in a tracker.

    Attributes:
        project: Name of the project.
        name: Name of the run.
        folder: Folder for files of the tracker; it need not exist.
        settings: The settings of the run, by path.
        online: Whether to send the data to the service.
        server: Address of the service, None for the default of the tracker.
        in_run: Whether `folder` lies in the run folder, whose contents are not trusted.
    """

    project: str
    name: str
    folder: Path
    settings: Mapping[str, str | float | None]
    online: bool = False
    server: str | None = None
    in_run: bool = False


class TrackerReader(ABC):
    """Writes the entries of a run to a tracker; see `evo_grpo.readers.reader.Reader`.

    Args:
        target: The destination of the run.
        id: Id of the run in the tracker; empty for a new run.

    Attributes:
        environment: Default values of environment variables of the tracker's package.
        makes_links: Whether the package creates links in its folder.
    """

    environment: ClassVar[Mapping[str, str]] = {}
    makes_links: ClassVar[bool] = False

    def __init__(self, target: Target, id: str) -> None:
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)
        if target.in_run and not self.makes_links:
            refuse_links(target.folder)
        target.folder.mkdir(parents=True, exist_ok=True)
        self.id = self.open(target, id)

    @abstractmethod
    def open(self, target: Target, id: str) -> str:
        """Start a run, or continue one.

        Args:
            target: The destination of the run.
            id: Id of the run to continue, empty for a new run.

        Returns:
            The id for continuing the run later.
        """

    @abstractmethod
    def write(self, values: Values) -> None:
        """Write the values of a step."""

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

    @abstractmethod
    def close(self) -> None:
        """Write the remaining values and end the run."""


def open_tracker(config: TrackerConfig, run: Path | None, settings: object, id: str) -> Reader:
    """Construct the reader of a tracker for a run with these settings.

    `run` is None for training without a run folder, and `id` is empty for a new run.

    Raises:
        EngineUnavailable: The package of the tracker is not installed.
    """
    check_trackers([config])
    # Without a run folder, the time is the name, so that TensorBoard does not mix two runs.
    unnamed = time.strftime("run-%Y%m%d-%H%M%S") if run is None else run.resolve().name
    name = config.name or unnamed
    target = Target(
        project=config.project or PROJECT,
        name=name,
        folder=_folder(config, run, name),
        settings=flat_settings(settings),
        online=config.online,
        server=config.server,
        in_run=config.folder is None and run is not None,
    )
    made: Reader = import_module(f"{__package__}.{config.kind}").Writer(target, id)
    return made


def _folder(config: TrackerConfig, run: Path | None, name: str) -> Path:
    if config.folder is None and run is not None:
        return run.resolve() / TRACKERS / config.kind
    folder = Path(config.folder or f"{TRACKERS}/{config.kind}").expanduser().resolve()
    # TensorBoard identifies a run by its folder; other trackers store the name with the data.
    return folder / name if config.kind == "tensorboard" else folder


def flat_settings(settings: object) -> dict[str, str | float | None]:
    """Return settings as a mapping from path to value for trackers; empty without settings.

    Rows of the user that stand in the settings are counted: a tracker may send them away.
    """
    dump = getattr(settings, "model_dump", None)
    found: dict[str, str | float | None] = {}
    values = cast("dict[str, Any]", dump(mode="json")) if callable(dump) else {}
    for path, value in flat(without_rows(values)):
        if isinstance(value, list):
            found[path] = ", ".join(map(str, cast("list[object]", value)))
        elif value != {}:
            found[path] = value if value is None or isinstance(value, int | float) else str(value)
    return found
