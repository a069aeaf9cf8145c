"""Opens Optuna studies, and storages: in memory, for the file of a run, or a database at a URL.

This module loads slowly; import it only in functions that open a study.
"""

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from inspect import unwrap
from typing import Any, final
from urllib.parse import parse_qsl

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import BaseJournalBackend
from sqlalchemy import exc
from sqlalchemy.pool import NullPool, StaticPool

from evo_grpo.errors import EvoGrpoError
from evo_grpo.escaping import printable, shorten
from evo_grpo.settings.evolve import ObjectiveConfig
from evo_grpo.settings.record import missing_driver

#: Options of a connection. Without them, a client waits hours for a machine that was switched off.
_POSTGRESQL = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,  # milliseconds
    "application_name": "evo-grpo",
    "client_encoding": "utf8",  # for servers that were set up without a locale
}
SQLITE_SECONDS = 30
"""Seconds that SQLite waits for another process that writes to the same file."""
_ATTEMPTS = 5
"""Greatest number of attempts to create tables; an attempt fails if another run creates them."""
#: Exceptions of a storage that cannot be used. Optuna raises AssertionError and RuntimeError for
#: tables of another version, and for a lock of its journal that cannot be removed.
REFUSED = (StorageInternalError, exc.SQLAlchemyError, RuntimeError, AssertionError)


class DatabaseError(EvoGrpoError, ConnectionError):
    """A database cannot be reached, rejects a statement, or has other tables than expected."""


@final
class _Journal(BaseJournalBackend):
    """A backend of Optuna's `JournalStorage` that keeps the lines of the journal in memory."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        return map(json.loads, self.lines[log_number_from:])

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self.lines += (json.dumps(log, separators=(",", ":")) + "\n" for log in logs)


def in_memory(*, sqlite: bool) -> tuple[BaseStorage, Callable[[], bytes]]:
    """Return a storage in memory, SQLite or a journal, and a function that returns its bytes."""
    if not sqlite:
        journal = _Journal()
        return JournalStorage(journal), lambda: "".join(journal.lines).encode()
    database = sqlite3.connect(":memory:", check_same_thread=False)
    options = {"creator": lambda: database, "poolclass": StaticPool}
    return RDBStorage("sqlite://", engine_kwargs=options), database.serialize


def check_url(url: str) -> None:
    """Check that a database can be used, and create its tables if they are missing, but no study.

    Raises:
        EngineUnavailable: The driver of the database is not installed.
        DatabaseError: The database cannot be used, or has tables of another version of Optuna.
    """
    with unreachable():
        for attempt in range(1, _ATTEMPTS):
            try:
                _storage(url, poolclass=NullPool)
                return
            except (exc.IntegrityError, exc.ProgrammingError, exc.OperationalError) as error:
                if isinstance(error, exc.OperationalError) and "already exists" not in str(
                    error.orig
                ):
                    raise
                # Another run is creating the same tables; try again when they exist.
                time.sleep(0.2 * attempt)
        _storage(url, poolclass=NullPool)


def connect(url: str) -> RDBStorage:
    """Open a database, which `disconnect` closes; raises the errors of `check_url`."""
    # First without a pool: a storage whose constructor fails leaves its pooled connections open.
    check_url(url)
    with unreachable():
        return _storage(url, pool_pre_ping=True)


def disconnect(storage: RDBStorage) -> None:
    """Close this process's connections to a database."""
    storage.remove_session()
    storage.engine.dispose()


@contextmanager
def unreachable() -> Generator[None]:
    """Turn errors of a database into DatabaseError, and a missing driver into EngineUnavailable."""
    try:
        yield
    except EvoGrpoError:
        raise
    except ImportError as error:
        raise missing_driver(str(error.__cause__ or error)) from None
    except (KeyError, *REFUSED) as error:
        raise DatabaseError(reason(error)) from error


def reason(error: BaseException) -> str:
    """Return what a database says in an exception, on one line and without the SQL statement."""
    if isinstance(error, KeyError):  # as Optuna raises it for an unknown study
        return "the study was deleted"
    messages: list[object] = []
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, exc.DBAPIError) and cause.orig:
            messages.append(cause.orig)
        elif isinstance(cause, OSError):
            messages.append(cause.strerror or cause)
        cause = cause.__cause__ or cause.__context__
    return printable(shorten(" ".join(str(messages[0] if messages else error).split())))


def _storage(url: str, **options: object) -> RDBStorage:
    connect_args: dict[str, Any] = {"timeout": SQLITE_SECONDS}
    if url.startswith("postgresql"):
        # Options in the URL take precedence.
        in_url = {name for name, _ in parse_qsl(url.partition("?")[2])}
        connect_args = {name: value for name, value in _POSTGRESQL.items() if name not in in_url}
    return RDBStorage(url, engine_kwargs={"connect_args": connect_args, **options})


def open_study(
    storage: BaseStorage,
    name: str,
    attributes: Mapping[str, Any] | None = None,
    further: Sequence[ObjectiveConfig] = (),
) -> optuna.Study:
    """Return a study, created if it is missing, with `attributes` as its user attributes.

    `further` are the objectives beside fitness, each with its direction.
    """
    names = [objective.name for objective in further]
    with _quiet():
        # Load an existing study by name: after a kill while tables were created, the database may
        # not keep names unique.
        tables = isinstance(storage, RDBStorage)
        if tables and name in optuna.get_all_study_names(storage):
            study = optuna.load_study(study_name=name, storage=storage)
        else:
            directions = [objective.minimize for objective in further]
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
        # Without the decorator, which warns that the method is experimental. In a reader's thread
        # `catch_warnings` could drop a warning of the main thread: all threads share the filters.
        unwrap(optuna.Study.set_metric_names)(study, ["fitness", *names])
    present = study.user_attrs
    for key, value in (attributes or {}).items():
        if key not in present or present[key] != value:
            study.set_user_attr(key, value)
    return study


@contextmanager
def _quiet() -> Generator[None]:
    """Suppress Optuna's message about a new study, then restore its log levels."""
    handlers = {handler: handler.level for handler in logging.getLogger("optuna").handlers}
    for handler, level in handlers.items():
        handler.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        for handler, level in handlers.items():
            handler.setLevel(level)
