"""Writes a run to trackio, in a SQLite file of the project or in a Space of Hugging Face.

accelerate's tracker is not used: it keeps settings in global state, takes no folder, and cannot
continue a run.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import Any, final

from evo_grpo.errors import ConfigError
from evo_grpo.readers.trackers.base import Settings, TrackerReader
from evo_grpo.settings.trackers import TrackerConfig

_VARIABLE = "TRACKIO_DIR"


@final
class Writer(TrackerReader):
    """Writes the log of a run to a run of trackio."""

    environment = {"HF_HUB_DISABLE_TELEMETRY": "1", "GRADIO_ANALYTICS_ENABLED": "False"}  # noqa: RUF012 -- read only

    def open(self, target: TrackerConfig, settings: Settings, id: str) -> str:
        """Start a run, or continue one."""
        trackio = _writing_to(Path(str(target.folder)))
        self.run = trackio.init(
            project=target.project,
            name=id or target.name,
            space_id=target.server,
            config=settings,
            resume="allow" if id else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return str(self.run.name)


def _writing_to(folder: Path) -> Any:  # noqa: ANN401 -- a module without types
    """Import trackio, so that it writes to `folder`.

    The first import fixes the folder. Raises ConfigError if trackio was imported with another
    folder. If the user has set TRACKIO_DIR, trackio writes there instead.
    """
    if _VARIABLE in os.environ:  # set by the user
        return import_module("trackio")
    os.environ[_VARIABLE] = str(folder)
    try:
        package_folder = Path(import_module("trackio.utils").TRACKIO_DIR)
        trackio = import_module("trackio")
    finally:
        del os.environ[_VARIABLE]  # child processes of this program may use other folders
    if package_folder != folder:
        raise ConfigError(
            f"trackio: expected the folder {folder}, got {package_folder}, which is fixed in "
            "a process; use another one, such as: evo-grpo follow RUN --to trackio"
        )
    return trackio
