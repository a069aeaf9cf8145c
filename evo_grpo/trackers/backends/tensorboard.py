"""TensorBoard: a run per agent, so that one chart of a metric shows all agents as its lines.

Events are written with TensorBoard's own writer: torch's, and so accelerate's, would load torch.
"""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any, final

from evo_grpo.trackers.backends.protocol import Progress
from evo_grpo.trackers.told import POPULATION, Beginning, Entry


@final
class TensorBoard:
    """Event files below a folder; see `Backend`."""

    def begin(self, beginning: Beginning, so_far: Progress) -> str:
        """See `Backend`."""
        assert beginning.folder is not None, "the tracker names one"
        self._events: Any = import_module("tensorboard.compat.proto.event_pb2")
        self._summary: Any = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer: Any = import_module("tensorboard.summary.writer.event_file_writer")
        self._folder = Path(beginning.folder)
        # A kill may have left entries later than what is known of: TensorBoard drops them here.
        self._purge = so_far.place[0] + 1 if so_far.id else None
        self._writers: dict[str, Any] = {}
        if not so_far.id:
            rows = [f"| {name} | {value} |" for name, value in beginning.settings.items()]
            text = "\n".join(["| setting | value |", "|---|---|", *rows])
            self._write(POPULATION, 0, [self._text("settings", text)])
        return "events"

    def log(self, entry: Entry) -> None:
        """See `Backend`."""
        for who in dict.fromkeys((*entry.values, *entry.texts)):
            values: list[Any] = [
                self._summary.Value(tag=name, simple_value=value)
                for name, value in entry.values.get(who, {}).items()
            ]
            if who in entry.texts:
                values.append(self._text("lineage", entry.texts[who]))
            self._write(who, entry.step, values)
        for writer in self._writers.values():
            writer.flush()

    def end(self) -> None:
        """See `Backend`."""
        for writer in self._writers.values():
            writer.close()

    def _write(self, who: str, step: int, values: list[Any]) -> None:
        writer = self._writers.get(who)
        if writer is None:
            writer = self._writers[who] = self._writer.EventFileWriter(str(self._folder / who))
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
