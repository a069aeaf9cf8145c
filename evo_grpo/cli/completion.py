"""Shell completion of run folders, and of setting names after --set.

It neither reads nor runs code that a configuration names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from evo_grpo.printable import printable

if TYPE_CHECKING:
    from evo_grpo.schema.group import Group

RUNS = "runs"
"""Parent folder of runs without --out."""


def complete_run(incomplete: str) -> list[str]:
    """Return the run folders that match, in runs/ and in the folder that was typed.

    If there are none, the shell completes folder names.
    """
    from evo_grpo.record.folder import is_run

    beside = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent)
    found: set[str] = set()
    for place in {Path(RUNS), beside}:
        try:
            found |= {str(path) for path in place.iterdir() if is_run(path)}
        except OSError:  # a missing or unreadable folder
            continue
    return sorted(one for one in found if one.startswith(incomplete) and printable(one) == one)


def complete_setting(incomplete: str) -> list[str]:
    """Return the matching paths of settings, such as algorithm.lr."""
    from evo_grpo.settings import RunConfig

    return sorted({name for name in _paths(RunConfig) if name.startswith(incomplete)})


def _paths(group: type[Group]) -> Iterator[str]:
    """Yield the paths of all values below a group of settings."""
    for name, field in group.model_fields.items():
        groups = list(_groups(field.annotation))
        if not groups:
            yield name
        for one in groups:
            yield from (f"{name}.{below}" for below in _paths(one))


def _groups(annotation: Any) -> Iterator[type[Group]]:  # noqa: ANN401 -- any annotation
    """Yield the groups in the annotation of a setting, one for each kind of a strategy."""
    from evo_grpo.schema.group import Group

    if isinstance(annotation, type):
        if issubclass(annotation, Group):
            yield annotation
        return
    origin = getattr(annotation, "__origin__", None)
    if origin not in (dict, list, tuple):
        for part in get_args(annotation):
            yield from _groups(part)
