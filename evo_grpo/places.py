"""Finds the files and modules of a configuration in several folders.

The working folder is searched first, then the folder of a command's YAML file or of --code. A path
that a run folder records is shown but never searched, because the run folder may come from a
stranger.
"""

import shlex
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from evo_grpo.errors import ConfigError


class _Place(NamedTuple):
    folder: Path
    is_code: bool


_PLACES: list[_Place] = []


@contextmanager
def searching(folder: str | Path | None, *, is_code: bool = False) -> Generator[None]:
    """In a `with` block, find files and modules in `folder` too; None adds no folder.

    `is_code` says that the option --code names the folder; commands in messages then repeat it.
    """
    if folder is None:
        yield
        return
    place = _Place(Path(folder).absolute(), is_code)
    before = list(sys.path)
    _PLACES.append(place)
    try:
        yield
    finally:
        _PLACES.remove(place)
        if str(place.folder) not in before and str(place.folder) in sys.path:
            sys.path.remove(str(place.folder))


def folders() -> list[Path]:
    """Return the folders in which files and modules are found, the working folder first."""
    return list(dict.fromkeys([Path.cwd(), *(place.folder for place in _PLACES)]))


def expanded(path: str | Path) -> Path:
    """Return a path with ~ replaced by the home directory.

    Raises:
        ConfigError: The path begins with ~, and no home directory is known.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{path}: expected a path without ~, since no home directory is known; write it in full"
        ) from None


def find(path: str | Path) -> Path:
    """Return the path of a file or folder, in the first of `folders` that has it.

    An absolute path, and a path that no folder has, are returned with ~ expanded.
    """
    target = Path(path).expanduser()
    if target.is_absolute() or target.exists():
        return target
    candidates = (folder / target for folder in folders()[1:])
    return next((candidate for candidate in candidates if candidate.exists()), target)


def as_option() -> str:
    """Return " --code FOLDER" if the running command has got this option, else ""."""
    code_folders = [place.folder for place in _PLACES if place.is_code]
    return f" --code {shlex.quote(str(code_folders[-1]))}" if code_folders else ""
