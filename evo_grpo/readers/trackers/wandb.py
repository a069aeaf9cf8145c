"""Writes a run to Weights & Biases, by default offline.

accelerate's tracker is not used: it has global settings, and cannot continue a run.
"""

from importlib import import_module
from typing import Any, final
from uuid import uuid4

from evo_grpo.readers.trackers.base import Settings, TrackerReader
from evo_grpo.settings.trackers import TrackerConfig


@final
class Writer(TrackerReader):
    """Writes the log of a run to a run of wandb."""

    environment = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}  # noqa: RUF012 -- read only
    makes_links = True

    def open(self, target: TrackerConfig, settings: Settings, id: str) -> str:
        """Start a run, or continue one."""
        wandb: Any = import_module("wandb")
        id = id or uuid4().hex[:16]
        self.run = wandb.init(
            project=target.project,
            name=target.name,
            id=id,
            dir=target.folder,
            mode="online" if target.online else "offline",
            # Offline, wandb cannot look the run up; the folders of all starts have the same id.
            resume="allow" if target.online else None,
            # Do not end another run of this process.
            reinit="create_new",
            config=settings,
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )
        return id
