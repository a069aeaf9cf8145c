"""MLflow: one run of an experiment, in a SQLite file or on a tracking server.

By its client: what accelerate's tracker calls works on a global run, a call for each value.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, final

from evo_grpo.trackers.backends.protocol import Progress
from evo_grpo.trackers.told import Beginning, Entry, side_by_side

T = TypeVar("T")
_METRICS, _OTHERS = 1000, 100
"""Most metrics, and most parameters or tags, that a server takes at once."""
_LONGEST = 500
"""Characters of a parameter that servers of all versions take."""


@final
class MLflow:
    """A run of MLflow; see `Backend`."""

    def begin(self, beginning: Beginning, so_far: Progress) -> str:
        """See `Backend`."""
        where, artifacts = beginning.server, None
        if where is None:
            assert beginning.folder is not None, "the tracker names one"
            folder = Path(beginning.folder).resolve()
            where, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
        self._entities: Any = import_module("mlflow.entities")
        self._client: Any = import_module("mlflow.tracking").MlflowClient(
            tracking_uri=where, registry_uri=where
        )
        if so_far.id:
            self._id = so_far.id
            self._client.update_run(self._id, status="RUNNING")
            return self._id
        experiment = self._experiment(beginning.project, artifacts)
        self._id = self._client.create_run(experiment, run_name=beginning.name).info.run_id
        settings = beginning.settings.items()
        params = [self._entities.Param(name, str(value)[:_LONGEST]) for name, value in settings]
        for some in _parts(params, _OTHERS):
            self._client.log_batch(self._id, params=some)
        return self._id

    def log(self, entry: Entry) -> None:
        """See `Backend`."""
        now = int(1000 * time.time())
        values = side_by_side(entry).items()
        metrics = [self._entities.Metric(name, value, now, entry.step) for name, value in values]
        for some in _parts(metrics, _METRICS):
            self._client.log_batch(self._id, metrics=some)
        tags = [
            self._entities.RunTag(f"lineage.{entry.step:06d}.{who}", text[: 10 * _LONGEST])
            for who, text in entry.texts.items()
        ]
        for some in _parts(tags, _OTHERS):
            self._client.log_batch(self._id, tags=some)

    def end(self) -> None:
        """See `Backend`."""
        self._client.set_terminated(self._id)

    def _experiment(self, name: str, artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        refused: Any = import_module("mlflow.exceptions").MlflowException
        try:
            return str(self._client.create_experiment(name, artifact_location=artifacts))
        except refused:  # another run made it meanwhile
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
