"""Connections to a database in which several runs have their Optuna studies.

Slow to load: it is imported where a database is opened, and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl

from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy.exc import (
    DBAPIError,
    IntegrityError,
    OperationalError,
    ProgrammingError,
    SQLAlchemyError,
)
from sqlalchemy.pool import NullPool

from evo_grpo.errors import EvoGrpoError
from evo_grpo.printable import cut, printable
from evo_grpo.settings.storage import missing_driver

#: How to connect. A machine that was switched off would else be waited for as long as the system
#: does, which is hours.
_POSTGRESQL = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,  # milliseconds
    "application_name": "evo-grpo",
    "client_encoding": "utf8",  # also of a server that was set up without a locale
}
SQLITE_SECONDS = 30
"""How long SQLite waits for another process that writes to the same file."""
_ATTEMPTS = 5
"""How often the tables are made, where several runs begin with an empty database at once."""
#: What Optuna raises where a storage refuses; it asserts and raises RuntimeError for tables of
#: another version, and for a lock of its journal that cannot be removed.
REFUSED = (StorageInternalError, SQLAlchemyError, RuntimeError, AssertionError)


class Unreachable(EvoGrpoError, ConnectionError):
    """A database does not do what it was asked to: it is gone, refuses, or was set up otherwise."""


def check_url(url: str) -> None:
    """Refuse a database that cannot be used; its tables are made when missing, but no study.

    Raises:
        EngineUnavailable: Its driver is not installed.
        Unreachable: The database is not there, refuses, or is of another version of Optuna.
    """
    with unreachable():
        for attempt in range(1, _ATTEMPTS):
            try:
                _storage(url, poolclass=NullPool)
                return
            except (IntegrityError, ProgrammingError, OperationalError) as error:
                if isinstance(error, OperationalError) and "already exists" not in str(error.orig):
                    raise
                # Another run is making the same tables; after a while they are there.
                time.sleep(0.2 * attempt)
        _storage(url, poolclass=NullPool)


def connect(url: str) -> RDBStorage:
    """Open a database, to be closed by `disconnect`; raises as `check_url`."""
    # First without a pool: a storage whose making fails cannot be closed, and leaves what is in it.
    check_url(url)
    with unreachable():
        return _storage(url, pool_pre_ping=True)


def disconnect(storage: RDBStorage) -> None:
    """Close the connections of this process to a database."""
    storage.remove_session()
    storage.engine.dispose()


@contextmanager
def unreachable() -> Generator[None]:
    """Turn what a database raises into `Unreachable`, with the words of the server.

    A driver that cannot be imported is an EngineUnavailable.
    """
    try:
        yield
    except EvoGrpoError:
        raise
    except ImportError as error:
        raise missing_driver(str(error.__cause__ or error)) from None
    except KeyError as error:
        raise Unreachable("somebody deleted the study") from error
    except REFUSED as error:
        raise Unreachable(reason(error)) from error


def reason(error: BaseException) -> str:
    """Return what a database said, on one line and without the statement, which may be long."""
    said: list[object] = []
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DBAPIError) and cause.orig:
            said.append(cause.orig)
        elif isinstance(cause, OSError):
            said.append(cause.strerror or cause)
        cause = cause.__cause__ or cause.__context__
    return printable(cut(" ".join(str(said[0] if said else error).split())))


def _storage(url: str, **options: object) -> RDBStorage:
    connect_args: dict[str, Any] = {"timeout": SQLITE_SECONDS}
    if url.startswith("postgresql"):
        # What the URL says itself, it says for a reason.
        said = {name for name, _ in parse_qsl(url.partition("?")[2])}
        connect_args = {name: value for name, value in _POSTGRESQL.items() if name not in said}
    return RDBStorage(url, engine_kwargs={"connect_args": connect_args, **options})
