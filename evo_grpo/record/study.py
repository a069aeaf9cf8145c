"""The Optuna study of a run: its name and attributes, and the study in the run folder.

Optuna takes a second to load, so only the functions that open a study import it.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from evo_grpo.errors import ConfigError, EvoGrpoError
from evo_grpo.record.files import many_objects, writing
from evo_grpo.record.folder import remove, remove_journal_locks
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.names import JOURNAL, STUDY, STUDY_ASIDES
from evo_grpo.record.plain import open_plain
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.settings import RunConfig
from evo_grpo.settings.evolve import ObjectiveConfig
from evo_grpo.settings.storage import check_driver, is_url

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage

    from evo_grpo.record.records import RoundRecord
    from evo_grpo.record.run_dir import RunDir
    from evo_grpo.types import Member, Score

_NAME_CHARACTERS = 400
"""Optuna keeps names of at most 512 characters."""

_log = logging.getLogger(__name__)


@final
class FolderStudy:
    """The study in a run folder, `journal.log` or `study.db`, written by the run.

    A study that is damaged or has other trials than those of the rounds is deleted and created
    again; `record` adds missing trials at the end. The folder is locked, so no other process writes
    to the study.

    Raises:
        RunDirError: The file is a link, or has another name elsewhere.
        RunFailedError: The file cannot be written.
    """

    def __init__(
        self, folder: RunDir, config: RunConfig, id: str, space: HyperparameterConfig
    ) -> None:
        self._config, self._id, self._space = config, id, space
        self._in_journal = config.record.storage is None
        self.file = folder.path / (JOURNAL if self._in_journal else STUDY)
        asides = () if self._in_journal else STUDY_ASIDES
        self._asides = [folder.path / name for name in asides]
        lineage = self._read(folder.rounds())
        if lineage is None:
            for path in (self.file, *self._asides):
                remove(path)
            remove_journal_locks(folder.path)  # Optuna waits for locks that failed calls left
            with _written(self.file):
                lineage = self._open()
        self._lineage = lineage

    def record(self, rounds: Sequence[RoundRecord]) -> None:
        """Add the missing trials of finished rounds."""
        with _written(self.file):
            for record in rounds:
                self._lineage.record(record)

    def record_mean(self, member: Member, last: RoundRecord, score: Score | None) -> None:
        """Add the trial of the mean of two survivors; see `Lineage.record_mean`."""
        with _written(self.file):
            self._lineage.record_mean(member, last, score)

    @many_objects()
    def _read(self, rounds: Sequence[RoundRecord]) -> Lineage | None:
        """Return the study, or None if it has to be created again."""
        with writing(self.file):
            if self._left_by_kill():
                return None
        try:
            lineage = self._open()
            if lineage.matches(rounds):
                return lineage
            reason = "its trials differ from the rounds"
        except Exception as error:  # a damaged file can raise any exception of Optuna or SQLite
            reason = f"it cannot be read ({error!r:.200})"
        _log.warning("%s: %s; created again from the rounds", self.file, reason)
        return None

    def _left_by_kill(self) -> bool:
        """Return whether a process was killed while writing to the file."""
        if any(map(os.path.lexists, self._asides)):
            # SQLite would replay its own journal, which can name another file to be deleted.
            return True
        if not os.path.lexists(self.file):
            return False
        with os.fdopen(open_plain(self.file, os.O_RDWR), "rb") as file:
            if not self._in_journal or not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"  # Optuna would append the next line to this one

    def _open(self) -> Lineage:
        import optuna

        config, name, attributes = self._config, self._config.name, dict[str, Any]()
        storage: BaseStorage
        if self._in_journal:
            from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

            # The default lock is a link to the journal, for which Optuna waits forever if the
            # folder was moved. This lock is a file.
            lock = JournalFileOpenLock(str(self.file))
            storage = optuna.storages.JournalStorage(JournalFileBackend(str(self.file), lock))
        else:
            from sqlalchemy.pool import NullPool

            from evo_grpo.record.database import SQLITE_SECONDS

            name, attributes = study_name(config, self._id), study_attributes(config, self._id)
            # Not a path in the URL: a question mark in it would begin options.
            connect = partial(
                sqlite3.connect, self.file, timeout=SQLITE_SECONDS, check_same_thread=False
            )
            storage = optuna.storages.RDBStorage(
                "sqlite://", engine_kwargs={"creator": connect, "poolclass": NullPool}
            )
        if set(optuna.get_all_study_names(storage)) - {name}:
            raise ValueError("it has the study of another run")  # `_read` adds it to its warning
        study = open_study(storage, name, attributes, config.evolve.fitness.further)
        return Lineage(study, self._space)


def open_study(
    storage: BaseStorage,
    name: str,
    attributes: Mapping[str, Any] | None = None,
    further: Sequence[ObjectiveConfig] = (),
) -> Study:
    """Return the study of a run in a storage, created if missing.

    `attributes` are the user attributes of the study; see `study_attributes`. `further` are the
    objectives beside fitness: with some, the study has several directions.
    """
    import optuna

    names = [one.name for one in further]
    with _quiet():
        # Load an existing study by name: after a kill while tables were created, the database may
        # not keep names unique.
        tables = isinstance(storage, optuna.storages.RDBStorage)
        if tables and name in optuna.get_all_study_names(storage):
            study = optuna.load_study(study_name=name, storage=storage)
        else:
            directions = [one.minimize for one in further]
            study = optuna.create_study(
                storage=storage,
                study_name=name,
                directions=[
                    "maximize",
                    *("minimize" if down else "maximize" for down in directions),
                ],
                load_if_exists=True,
            )
    if study.metric_names is None:
        # Without the decorator, which warns that the method is experimental. In the writer's thread
        # `catch_warnings` could drop a warning of the main thread: all threads share the filters.
        unwrap(optuna.Study.set_metric_names)(study, ["fitness", *names])
    present = study.user_attrs
    for key, value in (attributes or {}).items():
        if key not in present or present[key] != value:
            study.set_user_attr(key, value)
    return study


def check_storage(config: RunConfig) -> None:
    """Raise ConfigError if the database of a run cannot be used."""
    url = config.record.storage
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


def study_name(config: RunConfig, id: str) -> str:
    """Return the name of a run's study in a database, which includes the id of the run.

    Runs of early versions have an empty id.
    """
    name = config.name[:_NAME_CHARACTERS]
    return f"{name}-{id}" if id else name


def study_attributes(config: RunConfig, id: str) -> dict[str, Any]:
    """Return the user attributes of a run's study in a database."""
    fitness = config.evolve.fitness
    return {
        "name": config.name,
        "run_id": id,
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
        "evo_grpo": _version(),
    }


@contextmanager
def _written(file: Path) -> Generator[None]:
    """Convert exceptions of Optuna about a file that cannot be written into `RunFailedError`."""
    from evo_grpo.record.database import REFUSED, reason

    with writing(file):
        try:
            yield
        except EvoGrpoError:
            raise
        except REFUSED as error:
            raise OSError(reason(error)) from error


@contextmanager
def _quiet() -> Generator[None]:
    """Suppress Optuna's message about a new study, then restore its log levels."""
    handlers = {one: one.level for one in logging.getLogger("optuna").handlers}
    for handler, level in handlers.items():
        handler.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        for handler, level in handlers.items():
            handler.setLevel(level)


def _version() -> str:
    try:
        return version("evo-grpo")
    except PackageNotFoundError:  # imported from a source tree
        return "unknown"
