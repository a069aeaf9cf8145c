"""Shell completion of run folders, and of setting names after --set.

It neither reads nor runs code that a configuration names.
"""

from __future__ import annotations

from pathlib import Path

from evo_grpo.printable import printable

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
    from evo_grpo.schema.messages import leaves
    from evo_grpo.settings import RunConfig

    names = set(map(".".join, leaves(RunConfig)))
    return sorted(name for name in names if name.startswith(incomplete))
