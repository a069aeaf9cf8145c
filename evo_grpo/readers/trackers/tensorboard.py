"""Writes a run to TensorBoard, as one run per agent: a chart of a metric has a line per agent.

Events are written with TensorBoard's own writer, because the writers of torch and accelerate load
torch.
"""

import time
from importlib import import_module
from pathlib import Path
from typing import Any, final

from evo_grpo.readers.trackers.base import POPULATION, Settings, TrackerReader, Values
from evo_grpo.record.log import Entry, RoundDone, RunFinished, RunStarted, StepDone
from evo_grpo.settings.trackers import TrackerConfig


@final
class Writer(TrackerReader):
    """Writes event files below a folder, one subfolder (a run of TensorBoard) for each agent."""

    environment = {"TF_CPP_MIN_LOG_LEVEL": "3"}  # noqa: RUF012 -- read only
    named_by_folder = True

    def open(self, target: TrackerConfig, settings: Settings, id: str) -> str:
        """Import TensorBoard's writer, and return the folder of the event files as the id."""
        self._events: Any = import_module("tensorboard.compat.proto.event_pb2")
        self._summary: Any = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer: Any = import_module("tensorboard.summary.writer.event_file_writer")
        self._folder, self._settings = str(target.folder), settings
        # First step whose events by earlier writers are dropped, since they are written again.
        self._purge: int | None = None
        self._writers: dict[str, Any] = {}
        return self._folder

    def read(self, entry: Entry) -> None:
        """Write an entry of the log; at the start of a run, write its settings."""
        if isinstance(entry, RunStarted):
            self._purge = 0
            rows = [f"| {name} | {value} |" for name, value in self._settings.items()]
            text = "\n".join(["| setting | value |", "|---|---|", *rows])
            self._write(POPULATION, 0, [self._text("settings", text)])
        elif self._purge is None and isinstance(entry, StepDone | RoundDone | RunFinished):
            self._purge = entry.number + (not isinstance(entry, StepDone))
        super().read(entry)

    def write(self, values: Values) -> None:
        """Write the scalars and texts of a step."""
        for owner in dict.fromkeys((*values.values, *values.texts)):
            summaries: list[Any] = [
                self._summary.Value(tag=name, simple_value=value)
                for name, value in values.values.get(owner, {}).items()
            ]
            if owner in values.texts:
                summaries.append(self._text("lineage", values.texts[owner]))
            self._write(owner, values.step, summaries)

    def flush(self) -> bool:
        """Flush all event files to disk."""
        for writer in self._writers.values():
            writer.flush()
        return True

    def close(self) -> None:
        """Close all event files."""
        for writer in self._writers.values():
            writer.close()

    def _write(self, owner: str, step: int, values: list[Any]) -> None:
        writer = self._writers.get(owner)
        if writer is None:
            folder = Path(self._folder, owner)
            # Files are read in the order of their names, which begin with the time in seconds.
            while any(folder.glob(f"*.tfevents.{int(time.time()):010d}.*")):
                time.sleep(0.05)
            writer = self._writers[owner] = self._writer.EventFileWriter(str(folder))
            if self._purge is not None:
                start = self._events.SessionLog(status=self._events.SessionLog.START)
                writer.add_event(self._event(self._purge, session_log=start))
        writer.add_event(self._event(step, summary=self._summary(value=values)))

    def _event(self, step: int, **what: Any) -> Any:  # noqa: ANN401 -- messages of protobuf
        return self._events.Event(wall_time=time.time(), step=step, **what)

    def _text(self, tag: str, text: str) -> Any:  # noqa: ANN401 -- a message of protobuf
        about: Any = import_module("tensorboard.plugins.text.metadata")
        tensors: Any = import_module("tensorboard.util.tensor_util")
        return self._summary.Value(
            tag=tag,
            metadata=about.create_summary_metadata(display_name=tag, description=""),
            tensor=tensors.make_tensor_proto([text.encode()]),
        )
