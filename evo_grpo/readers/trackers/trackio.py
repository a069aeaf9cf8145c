"""trackio: one run in a SQLite file of the project, or in a Space of Hugging Face.

Written directly: accelerate's tracker keeps settings in trackio's global state, takes no folder,
and cannot continue a run.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any, final

from evo_grpo.errors import ConfigError
from evo_grpo.readers.trackers.base import Target, TrackerReader
from evo_grpo.readers.trackers.values import Values

_VARIABLE = "TRACKIO_DIR"


@final
class Writer(TrackerReader):
    """A run of trackio."""

    environment = {"HF_HUB_DISABLE_TELEMETRY": "1", "GRADIO_ANALYTICS_ENABLED": "False"}  # noqa: RUF012 -- read alone

    def open(self, target: Target, id: str) -> str:
        """See `TrackerReader`."""
        trackio = _writing_to(target.folder)
        self._run: Any = trackio.init(
            project=target.project,
            name=id or target.name,
            space_id=target.server,
            config=dict(target.settings),
            resume="allow" if id else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return str(self._run.name)

    def write(self, values: Values) -> None:
        """See `TrackerReader`."""
        self._run.log(values.with_texts(), step=values.step)

    def close(self) -> None:
        """See `TrackerReader`."""
        self._run.finish()


def _writing_to(folder: Path) -> Any:  # noqa: ANN401 -- a module without types
    """Import trackio, which has one folder in a process: that of a variable, when it is imported.

    Raises:
        ConfigError: It has another folder by now.
    """
    if _VARIABLE in os.environ:  # a person's choice
        return import_module("trackio")
    os.environ[_VARIABLE] = str(folder)
    try:
        found = Path(import_module("trackio.utils").TRACKIO_DIR)
        trackio = import_module("trackio")
    finally:
        del os.environ[_VARIABLE]  # other processes of this program have folders of their own
    if found != folder:
        raise ConfigError(
            f"trackio: expected to write to {folder}, but in this process it writes to {found}, "
            "and it cannot change that; use another process, such as: evo-grpo follow RUN --to "
            "trackio"
        )
    return trackio
