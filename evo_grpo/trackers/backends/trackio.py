"""trackio: one run in a SQLite file of the project, or in a Space of Hugging Face.

Written directly: accelerate's tracker keeps settings in trackio's global state, takes no folder,
and cannot go on with a run.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, final

from evo_grpo.trackers.backends.protocol import Progress
from evo_grpo.trackers.told import Beginning, Entry, side_by_side


@final
class Trackio:
    """A run of trackio; see `Backend`."""

    def begin(self, beginning: Beginning, so_far: Progress) -> str:
        """See `Backend`."""
        trackio: Any = import_module("trackio")
        self._run: Any = trackio.init(
            project=beginning.project,
            name=so_far.id or beginning.name,
            space_id=beginning.server,
            config=dict(beginning.settings),
            resume="allow" if so_far.id else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return str(self._run.name)

    def log(self, entry: Entry) -> None:
        """See `Backend`."""
        texts = {f"lineage/{who}": text for who, text in entry.texts.items()}
        self._run.log({**side_by_side(entry), **texts}, step=entry.step)

    def end(self) -> None:
        """See `Backend`."""
        self._run.finish()
