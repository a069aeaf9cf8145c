"""Which backend writes to which kind of tracker, and in what environment its package runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module

from evo_grpo.trackers.backends.protocol import Backend
from evo_grpo.trackers.told import Beginning


@dataclass(frozen=True)
class Kind:
    """A kind of tracker.

    Attributes:
        place: Module and class of its backend.
        environment: What its package reads from the environment, where that does not say otherwise:
            nobody is told that it runs here.
        folder: Variable that holds the folder in which it writes, empty for none.
    """

    place: str
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    folder: str = ""


_HERE = __name__.rpartition(".")[0]
KINDS: Mapping[str, Kind] = {
    "tensorboard": Kind(f"{_HERE}.tensorboard:TensorBoard", {"TF_CPP_MIN_LOG_LEVEL": "3"}),
    "wandb": Kind(
        f"{_HERE}.wandb:WandB",
        {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"},
    ),
    "trackio": Kind(
        f"{_HERE}.trackio:Trackio",
        {"HF_HUB_DISABLE_TELEMETRY": "1", "GRADIO_ANALYTICS_ENABLED": "False"},
        "TRACKIO_DIR",
    ),
    "mlflow": Kind(f"{_HERE}.mlflow:MLflow", {"MLFLOW_DISABLE_TELEMETRY": "true"}),
}


def environment(beginning: Beginning) -> dict[str, str]:
    """Return what the package of a tracker reads from the environment."""
    kind = KINDS[beginning.kind]
    found = dict(kind.environment)
    if kind.folder and beginning.folder is not None:
        found[kind.folder] = beginning.folder
    return found


def backend(kind: str) -> Backend:
    """Return a backend; its package is imported here."""
    module, _, name = KINDS[kind].place.partition(":")
    made: Backend = getattr(import_module(module), name)()
    return made
