"""Optuna's journal as a run keeps it: repaired when it is opened, an outline in memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, final

# Slow to load: this module is imported where a journal is opened, and nowhere else.
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial

from evo_grpo.errors import CheckpointError
from evo_grpo.record.plain import open_plain

# A lock is held for the milliseconds of a write: one held for seconds belongs to a dead process.
_GRACE_SECONDS = 5
#: User attributes of a trial by which a run finds it again.
ASKED = ("agent", "round", "member")
# Optuna's fields for the values of hyperparameters and their ranges.
_LEFT_OUT = {"params", "distributions"}

_log = logging.getLogger(__name__)


def journal(path: Path) -> JournalStorage:
    """Open a journal to add to it, after repairing what a process killed during a write left in it.

    Args:
        path: The file; made when missing.

    Returns:
        A storage whose trials have their state and value, and of their attributes those in `ASKED`;
        what is added to it is written whole. `whole_trials` reads them.

    Raises:
        CheckpointError: When a line is damaged.
    """
    # Absolute, since Optuna's lock is a link to this path: a relative link points to nothing, and
    # Optuna would wait for such a lock forever.
    path = path.absolute()
    lock = path.with_name(f"{path.name}.lock")
    if lock.is_symlink() and not lock.exists():  # the folder was moved after its process died
        lock.unlink()
    _drop_torn_line(path)
    try:
        return JournalStorage(
            _OutlineBackend(str(path), JournalFileSymlinkLock(str(path), _GRACE_SECONDS))
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: expected the journal that Optuna wrote, but a line is damaged ({error}); "
            "delete the file: a resume writes it anew from rounds.jsonl"
        ) from error


def whole_trials(path: Path, study_name: str) -> list[FrozenTrial]:
    """Read all trials of a study in a journal, by number."""
    storage = JournalStorage(JournalFileBackend(str(path)))
    trials = storage.get_all_trials(storage.get_study_id_from_name(study_name), deepcopy=False)
    return list(trials)


@final
class _OutlineBackend(JournalFileBackend):
    """Reads of every trial what a run asks for, its place, member and value.

    Optuna keeps all trials of a study in memory, also in the process that only adds to it. Whole,
    they would be most of what a long run's memory grows by. The file has everything.
    """

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Yield the lines from a number on; see `JournalFileBackend`."""
        for log in super().read_logs(log_number_from):
            outline = {key: value for key, value in log.items() if key not in _LEFT_OUT}
            if attributes := log.get("user_attrs"):
                asked = {key: attributes[key] for key in ASKED if key in attributes}
                outline["user_attrs"] = asked
            yield outline


def _drop_torn_line(path: Path) -> None:
    """Remove a last line without a line end, to which Optuna would append the next one."""
    if not os.path.lexists(path):
        return
    with os.fdopen(open_plain(path, os.O_RDWR), "r+b") as file:
        contents = file.read()
        whole = contents.rfind(b"\n") + 1
        if whole < len(contents):
            _log.warning("%s: dropped a torn last line of %d bytes", path, len(contents) - whole)
            file.truncate(whole)
