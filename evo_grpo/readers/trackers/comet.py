"""Writes a run to Comet, as an experiment, by default in an offline archive."""

from importlib import import_module
from typing import Any, final
from uuid import uuid4

from evo_grpo.readers.trackers.base import Settings, TrackerReader, Values
from evo_grpo.settings.trackers import TrackerConfig

_OFF = (
    *("log_code", "log_graph", "log_git_metadata", "log_git_patch", "log_env_details"),
    *("auto_metric_logging", "auto_param_logging", "auto_output_logging", "parse_args"),
)
"""Options of Comet that record facts on this process, switched off because it does not train."""


@final
class Writer(TrackerReader):
    """Writes a run to an experiment of Comet."""

    environment = {"COMET_LOGGING_CONSOLE": "ERROR", "COMET_INTERNAL_SENTRY_DSN": ""}  # noqa: RUF012 -- read only

    def open(self, target: TrackerConfig, settings: Settings, id: str) -> str:
        """Start an experiment, or continue one."""
        comet: Any = import_module("comet_ml")
        key = id or uuid4().hex
        self._experiment: Any = comet.start(
            project_name=target.project,
            experiment_key=key,
            # An offline archive is merged when it is uploaded, by its key.
            mode="get_or_create",
            online=target.online,
            experiment_config=comet.ExperimentConfig(
                name=target.name,
                offline_directory=target.folder,
                display_summary_level=0,
                **dict.fromkeys(_OFF, False),
            ),
        )
        self._experiment.log_parameters(settings)
        return key

    def write(self, values: Values) -> None:
        """Log the metrics and texts of a step."""
        self._experiment.log_metrics(values.by_name(), step=values.step)
        for owner, text in values.texts.items():
            self._experiment.log_other(f"lineage/{values.step:06d}/{owner}", text)

    def close(self) -> None:
        """End the experiment."""
        self._experiment.end()
