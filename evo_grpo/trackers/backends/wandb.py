"""Weights & Biases: one run, offline where nothing else is asked for.

Written directly: accelerate's tracker keeps settings in wandb's global state, and cannot go on with
a run.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, final
from uuid import uuid4

from evo_grpo.trackers.backends.protocol import Progress
from evo_grpo.trackers.told import Beginning, Entry, side_by_side


@final
class WandB:
    """A run of wandb; see `Backend`."""

    def begin(self, beginning: Beginning, so_far: Progress) -> str:
        """See `Backend`."""
        wandb: Any = import_module("wandb")
        id = so_far.id or uuid4().hex[:16]
        self._run: Any = wandb.init(
            project=beginning.project,
            name=beginning.name,
            id=id,
            dir=beginning.folder,
            mode="online" if beginning.online else "offline",
            # Offline it cannot ask: the folders of all starts have the same id instead.
            resume="allow" if beginning.online else None,
            config=dict(beginning.settings),
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )
        return id

    def log(self, entry: Entry) -> None:
        """See `Backend`."""
        texts = {f"lineage/{who}": text for who, text in entry.texts.items()}
        self._run.log({**side_by_side(entry), **texts}, step=entry.step)

    def end(self) -> None:
        """See `Backend`."""
        self._run.finish()
