"""Writes the Optuna study of a run, derived from its log, to the run folder or a database.

Optuna takes a second to load, so only the functions that open a study import it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from evo_grpo.errors import ConfigError, RunDirError
from evo_grpo.record.files import atomic_write, remove
from evo_grpo.record.folder import read_config, read_rounds
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.log import Entry, RoundDone, RunFinished
from evo_grpo.record.names import JOURNAL, STUDY, STUDY_ASIDES, SUMMARY
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.summary import read_summary
from evo_grpo.settings.record import check_driver, is_url

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

OPTUNA = "optuna"
"""Name of the reader of the log that writes the study; its cursor is in `readers/optuna.json`."""
SHARE = 10
"""Least pause after the file was written, as a multiple of the time that the write took."""
_NAME_CHARACTERS = 400
"""Greatest number of characters of a run's name in the study's name; Optuna's limit is 512."""


@final
class StudyReader:
    """Writes the trials of a run; a reader of its log (see `evo_grpo.readers.reader.Reader`).

    Each object reads the log from the start; after an error, construct a new object. The file in a
    run folder is rewritten as a whole; in a database, at `url`, missing trials are added. `id` is
    the saved name of the study, which may be longer than the result of `study_name`.
    """

    def __init__(self, run: Path, run_id: str, url: str | None = None, id: str = "") -> None:
        self._run, self._run_id, self._url = run, run_id, url
        self._config = config = read_config(run)
        journal = url is None and config.record.storage is None
        self._file = run / (JOURNAL if journal else STUDY)
        self._attributes = {} if journal else self._study_attributes()
        name = config.name if journal else study_name(config.name, run_id)
        self.id = id if id.startswith(f"{name}-") else name
        self._storage: RDBStorage | None = None
        self._content: Callable[[], bytes] | None = None
        self._lineage: Lineage | None = None
        self._last: RoundRecord | None = None
        self._behind, self._next = False, 0.0

    def _study_attributes(self) -> dict[str, Any]:
        """Return the user attributes of the study in a database."""
        config = self._config
        fitness = config.evolve.fitness
        return {
            "name": config.name,
            "run_id": self._run_id,
            "base": config.model.name,
            "task": config.env.kind,
            "algorithm": config.algorithm.kind,
            "objective": (
                f"fitness: mean reward on {fitness.prompts} validation prompts x "
                f"{fitness.per_prompt(fitness.samples)}"
            ),
            "agents": config.population.size,
            "rounds": config.population.rounds,
            "seed": config.seed,
            "evo_grpo": library_version(),
        }

    def read(self, entry: Entry) -> None:
        """Add the trials of a finished round, or the trial of the mean if that won the run.

        Raises:
            DatabaseError: The database cannot be used; the message quotes its error.
            RunDirError: The study has trials of a copy of this run with other results.
        """
        if not isinstance(entry, RoundDone | RunFinished):
            return
        from evo_grpo.record.database import unreachable

        try:
            with unreachable():
                if isinstance(entry, RoundDone):
                    self._add(entry.record)
                elif self._last is not None and self._lineage is not None:
                    self._lineage.record_mean(entry.summary, self._last)
        except BaseException:  # including Ctrl-C: close the connections
            self._disconnect()
            raise
        self._behind = self._url is None

    def flush(self) -> bool:
        """Write the file, unless it was written moments ago; return whether it is up to date.

        For a database, do nothing and return True.
        """
        if self._behind and time.monotonic() >= self._next:
            self._write()
        return not self._behind

    def close(self) -> None:
        """Write the file if it is out of date; close the connections to a database."""
        if self._behind:
            self._write()
        self._disconnect()

    def _write(self) -> None:
        assert self._content is not None, "something was read"
        began = time.monotonic()
        for name in STUDY_ASIDES if self._file.name == STUDY else ():
            # SQLite would replay a journal beside the file, which can name a file to be deleted.
            remove(self._run / name)
        atomic_write(self._file, self._content(), f"follow --to {OPTUNA}")
        ended = time.monotonic()
        self._behind, self._next = False, ended + SHARE * (ended - began)

    def _disconnect(self) -> None:
        storage, self._storage, self._lineage, self._behind = self._storage, None, None, False
        if storage is not None:
            from evo_grpo.record.database import disconnect

            disconnect(storage)

    def _add(self, record: RoundRecord) -> None:
        lineage = self._lineage or self._open()
        # Compare the last round once more: a copy of the run may have added its trials meanwhile.
        compared = [record] if self._last is None else [self._last, record]
        if self._url is not None and any(map(lineage.conflicts_with, compared)):
            raise RunDirError(
                f"{self._run}: expected its trials in study {self.id} of {self._url}, got those of "
                "a copy of this run with other results; write them to another database with: "
                f"evo-grpo follow {self._run} --to {OPTUNA} --storage URL"
            )
        lineage.record(record)
        self._last = record

    def _open(self) -> Lineage:
        from evo_grpo.record.database import connect, in_memory, open_study

        if self._url is None:
            storage, self._content = in_memory(sqlite=self._file.name == STUDY)
        else:
            storage = self._storage = connect(self._url)
        further = self._config.evolve.fitness.further
        study = open_study(storage, self.id, self._attributes, further)
        self._lineage = Lineage(study, self._config.search_space())
        return self._lineage


def study_is_written(run: Path) -> bool:
    """Return whether the study file of a finished run was written after summary.json."""
    files = [run / name for name in (JOURNAL, STUDY) if (run / name).is_file()]
    end = (run / SUMMARY).stat().st_mtime_ns
    return any(file.stat().st_mtime_ns >= end for file in files)


def write_study(run: Path, run_id: str) -> None:
    """Write the study in a run folder from its rounds and summary; RunFailedError if this fails."""
    reader = StudyReader(run, run_id)
    for record in read_rounds(run):
        reader.read(RoundDone(0, record))
    if (summary := read_summary(run)) is not None:
        reader.read(RunFinished(0, summary))
    reader.close()


def check_storage(url: str | None) -> None:
    """Raise ConfigError if the database of a run, as in `record.storage`, cannot be used."""
    if url is None or not is_url(url):
        return
    check_driver(url)
    from evo_grpo.record.database import DatabaseError, check_url

    try:
        check_url(url)
    except DatabaseError as error:
        remedy = "create the folder of the file, or give permission"
        if not url.startswith("sqlite"):
            remedy = (
                "start the server, and check host, port, user and database; the password comes "
                "from PGPASSWORD or ~/.pgpass"
            )
        raise ConfigError(f"record.storage: {url} cannot be used: {error}; {remedy}") from error


def study_name(run: str, id: str) -> str:
    """Return the name of a run's study in a database; runs of early versions have the id ""."""
    name = run[:_NAME_CHARACTERS]
    return f"{name}-{id}" if id else name


def library_version() -> str:
    """Return the version of this library."""
    try:
        return version("evo-grpo")
    except PackageNotFoundError:  # imported from a source tree
        return "unknown"
