"""Folders, outside of run folders, in which a command finds files and modules; see `places`."""

from __future__ import annotations

from pathlib import Path

from evo_grpo.errors import ConfigError
from evo_grpo.record.folder import run_containing


def beside(config: object) -> Path | None:
    """Return the folder in which files and modules of a configuration are found too.

    This is the folder of a YAML file, unless it lies in a run folder, whose copy of the file may
    come from a stranger. None for a configuration that is not the path of a file.
    """
    if not isinstance(config, str | Path):
        return None
    folder = Path(config).expanduser().absolute().parent
    return None if run_containing(folder) else folder


def code_folder(path: str | Path | None) -> Path | None:
    """Return the folder of --code.

    Raises:
        ConfigError: It is no folder, or lies in a run folder, whose code is never imported.
    """
    if path is None:
        return None
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(
            f"--code {path}: expected a folder, got {'a file' if folder.exists() else 'none'}"
        )
    if run := run_containing(folder):
        raise ConfigError(
            f"--code {path}: expected a folder outside of any run folder, got one in {run}: what "
            "lies there may have come with the folder; read it, and move it out of there"
        )
    return folder
