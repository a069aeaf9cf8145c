"""What the trackers share: each is a reader of the log in a module named after its kind.

A new one is that module with a class `Writer`, a line in `evo_grpo.settings.trackers.KINDS` and an
extra in pyproject.toml.
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
from evo_grpo.settings.trackers import TrackerConfig, check_trackers
from evo_grpo.training.inputs.made_of import flat

if TYPE_CHECKING:
    from evo_grpo.readers.reader import Reader

PROJECT = "evo-grpo"


@dataclass(frozen=True)
class Target:
    """Where a tracker writes a run.

    Attributes:
        project: To which the run belongs.
        name: Of the run.
        folder: Where the tracker may write; it need not exist.
        settings: The settings of the run, by path.
        online: Send to the service.
        server: Where it is sent, None for the tracker's own or for none.
        in_run: The folder is one of the run folder, which may come from somebody else.
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
        target: Where.
        id: What the tracker calls the run; empty for a run that is new to it.

    Attributes:
        environment: What the package of the tracker reads from the environment, where that does
            not say otherwise.
        makes_links: The package makes links in its folder.
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
        """Begin a run, or continue one.

        Args:
            target: Where.
            id: The id of the run to be continued, empty for a new one.

        Returns:
            The id by which the run is continued later.
        """

    @abstractmethod
    def write(self, values: Values) -> None:
        """Write what was measured at a step."""

    def read(self, entry: Entry) -> None:
        """Write an entry of the log."""
        values = values_of(entry)
        if values is not None:
            self.write(values)

    def flush(self) -> bool:
        """Return whether what was written outlives a kill of this process.

        False where the package writes by a thread or process of its own: the cursor of the reader
        moves when it is closed then, and after a kill all since then is written again.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """Write what is left; nothing follows."""


def open_tracker(config: TrackerConfig, run: Path | None, settings: object, id: str) -> Reader:
    """Return the reader of a kind of tracker, for a run with these settings.

    `run` is None where the run has no folder, and `id` empty where it is new to the tracker.

    Raises:
        EngineUnavailable: The package of the tracker is not installed.
    """
    check_trackers([config])
    # Runs without a folder get the time as a name, so that TensorBoard does not mix two of them.
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
    # TensorBoard knows a run by its folder; the others keep runs apart in what they write.
    return folder / name if config.kind == "tensorboard" else folder


def flat_settings(settings: object) -> dict[str, str | float | None]:
    """Return settings by path, as trackers show them; nothing where there are none."""
    dump = getattr(settings, "model_dump", None)
    found: dict[str, str | float | None] = {}
    values = cast("dict[str, Any]", dump(mode="json")) if callable(dump) else {}
    for path, value in flat(values):
        if isinstance(value, list):
            found[path] = ", ".join(map(str, cast("list[object]", value)))
        elif value != {}:
            found[path] = value if value is None or isinstance(value, int | float) else str(value)
    return found
