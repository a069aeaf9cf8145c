"""Never import code from inside a run folder, regardless of the current folder.

A run folder may come from a stranger, together with the digests that would accept the stranger's
module. Installed packages may be imported, also from an environment below a run folder.
"""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import final

from evo_grpo.record.folder import run_containing


class CodeOfARunError(ImportError):
    """A module lies in a run folder, directly or through a link."""


def refuse_code_of_a_run(name: str, file: str | Path) -> None:
    """Refuse a module whose file lies in a run folder."""
    if _is_installed(str(file)):
        return
    run = run_containing(Path(file))
    if run is not None:
        raise CodeOfARunError(
            f"{file}: expected the module {name!r} outside of any run folder, got one in {run}: "
            "what lies there may have come with the folder, and is never imported; read it, and "
            "move it out of there",
            name=name,
        )


def guard_imports() -> None:
    """Refuse every later import of a module that lies in a run folder."""
    if _GUARD not in sys.meta_path:
        finders = sys.meta_path
        # Before the finder that searches sys.path, and after those of the modules built into
        # Python.
        place = finders.index(PathFinder) if PathFinder in finders else 0
        finders.insert(place, _GUARD)


def is_guard(finder: object) -> bool:
    """Return whether an entry of `sys.meta_path` is the one that `guard_imports` adds."""
    return finder is _GUARD


@final
class _Guard(MetaPathFinder):
    """Raises for a module in a run folder, and leaves all others to the other finders."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        places = sys.path if path is None else path
        if all(_is_installed(place) for place in places if isinstance(place, str)):  # pyright: ignore[reportUnnecessaryIsInstance] -- anybody may put other things there
            return None
        found = PathFinder.find_spec(fullname, path, target)
        if found is not None and found.has_location and found.origin is not None:
            refuse_code_of_a_run(fullname, found.origin)
        return None


_GUARD = _Guard()


@cache
def _is_installed(place: str) -> bool:
    """Return whether a path lies where packages are installed."""
    path = Path(place)
    return any(path.is_relative_to(folder) for folder in _installed_in())


@cache
def _installed_in() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    own = [sysconfig.get_path(name) for name in names]
    return tuple(one for one in (*own, site.getusersitepackages()) if one)
