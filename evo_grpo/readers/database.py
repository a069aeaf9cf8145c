"""The reader that adds the trials of a run to a database outside of the run folder."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, final

from evo_grpo.errors import ConfigError
from evo_grpo.readers.reader import id_of
from evo_grpo.record.config import read_config
from evo_grpo.record.files import to_line
from evo_grpo.record.folder import expect_run, read_rounds
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.log import Entry, RoundDone, RunFinished
from evo_grpo.record.names import STUDY
from evo_grpo.record.records import RoundRecord, to_json
from evo_grpo.record.study import open_study, study_attributes, study_name
from evo_grpo.settings import RecordConfig
from evo_grpo.settings.storage import is_url
from evo_grpo.training.inputs.recorded_inputs import read_inputs_of
from evo_grpo.types import Member, Mutation, Score, Slot

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

NAME = "optuna"
"""Name of the reader; its cursor is in `readers/optuna.json`."""


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=2)


@final
class DatabaseReader:
    """Adds the trials that are missing in the study of a run in a database.

    It compares the log with the study, so it reads the log from the start each time it is
    constructed (`feed(..., from_start=True)`). After an error, construct a new one.

    Args:
        run: The run folder.
        url: URL of the database, as in `record.storage`.
        id: Name of the study; empty at first.
        warn: Called with a message if the run changes to another study.

    Attributes:
        id: Name of the study. If the study has trials of a copy of the run with other results, the
            reader warns and changes to a study with another name.
    """

    def __init__(
        self, run: Path, url: str, id: str, *, warn: Callable[[str], None] = _warn
    ) -> None:
        self.id = id
        self._warn = warn
        self._run = run
        self._url = url
        self._storage: RDBStorage | None = None
        self._lineage: Lineage | None = None
        self._last: RoundRecord | None = None

    def read(self, entry: Entry) -> None:
        """Add the trials of a finished round, or the trial of the mean if that won the run.

        Raises:
            EngineUnavailable: The driver of the database is not installed.
            DatabaseError: The database cannot be used; the message quotes its error.
            CheckpointError: The run folder is damaged.
        """
        if not isinstance(entry, RoundDone | RunFinished):
            return
        from evo_grpo.record.database import unreachable

        try:
            with unreachable():
                if isinstance(entry, RoundDone):
                    self._add(entry.record)
                else:
                    self._add_mean(entry.summary)
        except BaseException:  # including Ctrl-C: close the connections
            self.close()
            raise

    def flush(self) -> bool:
        """Return True: trials are committed when they are added."""
        return True

    def close(self) -> None:
        """Close the connections to the database."""
        from evo_grpo.record.database import disconnect

        storage, self._storage, self._lineage = self._storage, None, None
        if storage is not None:
            disconnect(storage)

    def _add(self, record: RoundRecord) -> None:
        lineage = self._lineage or self._open()
        # Compare the last round once more: a copy of the run may have added its trials meanwhile.
        compared = [record] if self._last is None else [self._last, record]
        if any(map(lineage.conflicts_with, compared)):
            self._change_study(record)
            for before in read_rounds(self._run)[: record.round + 1]:
                self._add(before)
        else:
            lineage.record(record)
            self._last = record

    def _add_mean(self, summary: Mapping[str, Any]) -> None:
        if self._last is not None and self._lineage is not None:
            add_mean(self._lineage, summary, self._last)

    def _open(self) -> Lineage:
        from evo_grpo.record.database import connect

        config, id = read_config(self._run), read_inputs_of(self._run).id
        self.id = self.id or study_name(config, id)
        self._storage = connect(self._url)
        further = config.evolve.fitness.further
        study = open_study(self._storage, self.id, study_attributes(config, id), further)
        self._lineage = Lineage(study, config.search_space())
        return self._lineage

    def _change_study(self, record: RoundRecord) -> None:
        """Change to another study, whose name is derived from the round: a retry finds it again."""
        old, line = self.id, to_line(to_json(record), sort_keys=True)
        digest = hashlib.sha256(f"{old} {line}".encode(errors="replace")).hexdigest()[:6]
        self.close()
        config = read_config(self._run)
        self.id = f"{study_name(config, read_inputs_of(self._run).id)}-{digest}"
        self._last = None
        self._warn(
            f"record.storage: study {old} in {self._url} holds trials of a copy of this run with "
            f"other results; the trials of {self._run} are in study {self.id} from now on"
        )


def study_of(run: str | Path) -> tuple[str, str] | None:
    """Return the name and the storage URL of a run's study, for `optuna.load_study`.

    Args:
        run: The run folder.

    Returns:
        The name and the URL, or None if the study is a journal in the run folder.
    """
    folder = expect_run(run)
    config = read_config(folder)
    storage = config.record.storage
    if storage is None:
        return None
    name = study_name(config, read_inputs_of(folder).id)
    if not is_url(storage):
        return name, f"sqlite:///{folder / STUDY}"
    return id_of(folder, NAME) or name, storage


def deliver(run: str | Path, *, storage: str | None = None) -> NoReturn:
    """Removed; use `follow`. This name will be removed in the next release.

    Raises:
        ConfigError: Always; the message has the equivalent call of `follow`.
    """
    if storage is not None:
        RecordConfig(storage=storage)  # raises for a URL with a password, without quoting it
    option, given = ("", "") if storage is None else (f" --storage {storage}", ", storage=...")
    raise ConfigError(
        f'deliver: was removed; call evo_grpo.follow("{run}", to=["{NAME}"]{given}), or on the '
        f"command line: evo-grpo follow {run} --to {NAME}{option}"
    )


def add_mean(lineage: Lineage, summary: Mapping[str, Any], last: RoundRecord) -> None:
    """Add the trial of the mean of two survivors if it is the winner and `last` the last round."""
    best = summary["best"]
    scores = [one["validation"] for one in summary["candidates"] if one["kind"] == "mean"]
    ended = summary["rounds"] == last.round + 1
    if not ended or best["kind"] != "mean" or not scores or scores[0] is None:
        return
    first, second = best["parents"]
    mean, error = (
        math.nan if scores[0][name] is None else scores[0][name] for name in ("mean", "se")
    )
    # -1: the mean has no slot.
    member = Member(best["member"], Slot(-1), first, last.round + 1, Mutation("mean"), second)
    lineage.record_mean(member, last, Score(mean, error, scores[0]["n"]))
