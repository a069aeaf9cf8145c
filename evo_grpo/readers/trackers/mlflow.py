"""Writes a run to MLflow, as a run of an experiment in a SQLite file or on a tracking server.

accelerate's tracker is not used: it writes to a global run, with one call per value.
"""

import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, final

from evo_grpo.readers.trackers.base import Settings, TrackerReader, Values
from evo_grpo.settings.trackers import TrackerConfig

T = TypeVar("T")
_METRICS, _OTHERS = 1000, 100
"""Greatest number of metrics in a call to a server, and greatest number of parameters or tags."""
_LONGEST = 500
"""Greatest number of characters of a parameter's value that servers of all versions accept."""


@final
class Writer(TrackerReader):
    """Writes the log of a run to a run of MLflow."""

    environment = {"MLFLOW_DISABLE_TELEMETRY": "true"}  # noqa: RUF012 -- read only

    def open(self, target: TrackerConfig, settings: Settings, id: str) -> str:
        """Start a run, or continue one."""
        uri, artifacts = target.server, None
        if uri is None:
            folder = Path(str(target.folder))
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
        self._entities: Any = import_module("mlflow.entities")
        self._client: Any = import_module("mlflow.tracking").MlflowClient(
            tracking_uri=uri, registry_uri=uri
        )
        if id:
            self._run = id
            self._client.update_run(id, status="RUNNING")
            return id
        experiment = self._experiment(str(target.project), artifacts)
        self._run = str(self._client.create_run(experiment, run_name=target.name).info.run_id)
        params = [self._entities.Param(k, str(v)[:_LONGEST]) for k, v in settings.items()]
        for batch in _parts(params, _OTHERS):
            self._client.log_batch(self._run, params=batch)
        return self._run

    def write(self, values: Values) -> None:
        """Log the metrics and texts of a step."""
        now = int(1000 * time.time())
        metrics = [
            self._entities.Metric(name, value, now, values.step)
            for name, value in values.by_name().items()
        ]
        for batch in _parts(metrics, _METRICS):
            self._client.log_batch(self._run, metrics=batch)
        tags = [
            self._entities.RunTag(f"lineage.{values.step:06d}.{owner}", text[: 10 * _LONGEST])
            for owner, text in values.texts.items()
        ]
        for batch in _parts(tags, _OTHERS):
            self._client.log_batch(self._run, tags=batch)

    def flush(self) -> bool:
        """Return True, because the server or the file already has all values."""
        return True

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)

    def _experiment(self, name: str, artifacts: str | None) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        api_error: Any = import_module("mlflow.exceptions").MlflowException
        try:
            return str(self._client.create_experiment(name, artifact_location=artifacts))
        except api_error:  # another run has created it meanwhile
            experiment = self._client.get_experiment_by_name(name)
            if experiment is None:
                raise
            return str(experiment.experiment_id)


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
