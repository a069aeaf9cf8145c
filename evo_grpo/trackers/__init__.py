"""Trackers that follow a run: TensorBoard, wandb, trackio, MLflow, or any tracker of accelerate."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evo_grpo.trackers.tracker import Tracker

__all__ = ["Tracker"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- whatever the name stands for
    # Late: the process of a tracker, which comes by here, needs none of what this imports.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from evo_grpo.trackers.tracker import Tracker

    globals()[name] = Tracker
    return Tracker
