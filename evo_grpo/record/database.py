"""Optuna's databases as a run keeps its trials in them: each trial once, an outline in memory.

Slow to load: it is imported where a database is opened, and nowhere else.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, Self, final
from urllib.parse import parse_qsl

from optuna.exceptions import DuplicatedStudyError, StorageInternalError
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial
from sqlalchemy.exc import DBAPIError, IntegrityError, ProgrammingError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from evo_grpo.errors import CheckpointError, EvoGrpoError, RunFailedError
from evo_grpo.printable import cut, printable
from evo_grpo.record.folder import remove
from evo_grpo.record.journal import ASKED
from evo_grpo.record.lineage import quiet
from evo_grpo.record.names import STUDY_ASIDES
from evo_grpo.record.plain import open_plain, refuse_links
from evo_grpo.record.trials import StudyChanged
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
_SQLITE_SECONDS = 30
"""So long is waited for another process that writes to the same file."""
_ATTEMPTS = 5
"""To make the tables, where several runs begin with an empty database at once."""
#: Optuna's own name for it; `Study.set_metric_names` says with a warning that it may change.
_METRIC_NAMES = "study:metric_names"
#: Why SQLite could not write, as opposed to what says that a file is damaged.
_NOT_WRITTEN = frozenset(
    {
        *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM),
        *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED),
    }
)


class Unreachable(EvoGrpoError, ConnectionError):
    """A database does not do what it was asked to: it is gone, refuses, or was set up otherwise."""


@final
class NumberedStorage(RDBStorage):
    """An Optuna database that adds a trial with an expected number, or not at all.

    Whether a trial was added is unknown where the connection breaks before the server has confirmed
    it, and Optuna then adds it again. Not here: the number is compared within the transaction,
    which holds the lock of the study. So a trial is there once, whoever else adds to the study.

    Attributes:
        next_number: That of the next trial.
    """

    next_number = 0

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        try:
            super().__init__(url, engine_kwargs=dict(options))
        except BaseException:  # Ctrl-C too: its connections must not stay open
            if hasattr(self, "engine"):
                self.engine.dispose()
            raise

    def _get_prepared_new_trial(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 -- Optuna's own model
        trial = super()._get_prepared_new_trial(*args, **kwargs)
        if trial.number != self.next_number:  # pyright: ignore[reportGeneralTypeIssues] -- a number once it is read
            raise StudyChanged(f"expected trial {self.next_number} to be next, got {trial.number}")
        return trial

    # A trial has dozens of attributes. Optuna looks for each of them first, and a server at some
    # distance takes seconds to answer so often; those of a new trial can all be added at once.
    def _set_trial_attr_without_commit(
        self,
        session: Any,  # noqa: ANN401 -- Optuna's own types, here and below
        model_cls: Any,  # noqa: ANN401
        trial_id: int,
        key: str,
        value: Any,  # noqa: ANN401
    ) -> None:
        session.add(model_cls(trial_id=trial_id, key=key, value_json=json.dumps(value)))


@final
class DatabaseStudy:
    """A study in a database; made when missing.

    Trials are added, and never change. What is kept of them is an outline: number, state, value and
    the attributes in `ASKED`; `whole_trials` has everything.

    Args:
        storage: The database, which is closed with the study.
        name: Name of the study.
        attributes: What the study says of itself.
        guard: Turns what the database raises into an error of this library.

    Attributes:
        study_name: The name.
    """

    def __init__(
        self,
        storage: NumberedStorage,
        name: str,
        attributes: Mapping[str, Any],
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.study_name = name
        self._storage = storage
        self._guard = guard
        with guard(), quiet():
            self._id = _study_id(storage, name)
            self._describe(attributes)
        self._outlines = [_outline(trial) for trial in self.whole_trials()]

    def __enter__(self) -> Self:
        """Return the study."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the database."""
        self.close()

    def get_trials(self, deepcopy: Literal[False] = False) -> list[FrozenTrial]:
        """Return the outlines of all trials, by number; see `optuna.Study.get_trials`."""
        del deepcopy
        with self._guard():
            # Nearly always there is no other: then the database is asked one question.
            while (new := self._trial_id(len(self._outlines))) is not None:
                self._outlines.append(_outline(self._storage.get_trial(new)))
        return self._outlines

    def whole_trials(self) -> list[FrozenTrial]:
        """Return all trials, by number."""
        with self._guard():
            found = self._storage.get_all_trials(self._id, deepcopy=False)
        return sorted(found, key=lambda trial: trial.number)

    def add_trial(self, trial: FrozenTrial) -> None:
        """Add a trial as the one after those that `get_trials` returned last.

        Raises:
            StudyChanged: There is such a one by now; nothing was added.
        """
        self._storage.next_number = number = len(self._outlines)
        with self._guard():
            self._storage.create_new_trial(self._id, template_trial=trial)
        trial.number = number
        self._outlines.append(_outline(trial))

    def close(self) -> None:
        """Close the connections of this process."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def _trial_id(self, number: int) -> int | None:
        try:
            return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)
        except KeyError:
            return None

    def _describe(self, attributes: Mapping[str, Any]) -> None:
        there = self._storage.get_study_user_attrs(self._id)
        for name, value in attributes.items():
            if name not in there or there[name] != value:
                self._storage.set_study_user_attr(self._id, name, value)
        if _METRIC_NAMES not in self._storage.get_study_system_attrs(self._id):
            self._storage.set_study_system_attr(self._id, _METRIC_NAMES, ["fitness"])


def open_url(url: str, name: str, attributes: Mapping[str, Any]) -> DatabaseStudy:
    """Open a study in a database that a URL names; tables are made when missing.

    Args:
        url: As `check_storage` lets it pass.
        name: Name of the study.
        attributes: What the study says of itself.

    Raises:
        EngineUnavailable: Its driver is not installed.
        Unreachable: The database is not there, refuses, or is of another version of Optuna.
    """
    storage = _opened_url(url)
    try:
        return DatabaseStudy(storage, name, attributes, unreachable)
    except EvoGrpoError:
        storage.engine.dispose()
        raise


def check_url(url: str) -> None:
    """Open a database and close it again; its tables are made when missing, but no study.

    Raises:
        EngineUnavailable: Its driver is not installed.
        Unreachable: The database is not there, refuses, or is of another version of Optuna.
    """
    _opened_url(url).engine.dispose()


def open_file(file: Path, name: str, attributes: Mapping[str, Any]) -> DatabaseStudy:
    """Open the study in the SQLite file of a run folder; made when missing.

    What a killed process was writing is not taken up: the file is removed, and a resume fills it
    again. SQLite would follow what lies beside it, of which a folder from somebody else may have
    anything: one of its own journals can name another file that is then deleted.

    Args:
        file: Where.
        name: Name of the study.
        attributes: What the study says of itself.

    Raises:
        RunDirError: It, or what SQLite keeps beside it, is a link.
        CheckpointError: It is damaged.
        RunFailedError: It cannot be written.
    """
    asides = [file.with_name(aside) for aside in STUDY_ASIDES]
    if any(map(os.path.lexists, asides)):
        for path in (file, *asides):
            remove(path)

    def connect() -> sqlite3.Connection:
        os.close(open_plain(file, os.O_RDWR | os.O_CREAT))
        for path in asides:
            refuse_links(path)
        return sqlite3.connect(file, timeout=_SQLITE_SECONDS, check_same_thread=False)

    with _of_file(file):
        # Without the path in the URL, where it could mean something else.
        storage = _opened("sqlite://", {"creator": connect, "poolclass": NullPool})
    return DatabaseStudy(storage, name, attributes, lambda: _of_file(file))


@contextmanager
def unreachable() -> Generator[None]:
    """Turn what a database raises into `Unreachable`, with the words of the server.

    Raises:
        EngineUnavailable: Its driver cannot be imported.
        Unreachable: Anything else.
    """
    try:
        yield
    except ImportError as error:
        raise missing_driver(str(error.__cause__ or error)) from None
    except (StorageInternalError, SQLAlchemyError) as error:
        raise Unreachable(_reason(error)) from error
    except KeyError as error:
        raise Unreachable("somebody deleted the study") from error
    except (RuntimeError, AssertionError) as error:  # how Optuna says that its tables are others
        raise Unreachable(_reason(error)) from error


@contextmanager
def _of_file(file: Path) -> Generator[None]:
    """Turn what SQLite raises into an error of this library."""
    try:
        yield
    except EvoGrpoError:
        raise
    except (StorageInternalError, SQLAlchemyError, RuntimeError, LookupError, ValueError) as error:
        if _sqlite_code(error) in _NOT_WRITTEN:
            raise RunFailedError(
                f"{file}: cannot be written ({_reason(error)}); make room or give permission, then "
                "go on with: evo-grpo resume RUN"
            ) from error
        raise CheckpointError(
            f"{file}: expected the trials that Optuna wrote, but the file is damaged "
            f"({_reason(error)}); delete it: a resume writes it anew from rounds.jsonl"
        ) from error


def _opened_url(url: str) -> NumberedStorage:
    options: dict[str, Any] = {"timeout": _SQLITE_SECONDS}
    if url.startswith("postgresql"):
        # What the URL says itself, it says for a reason.
        said = {name for name, _ in parse_qsl(url.partition("?")[2])}
        options = {name: value for name, value in _POSTGRESQL.items() if name not in said}
    with unreachable():
        return _opened(url, {"pool_pre_ping": True, "connect_args": options})


def _opened(url: str, options: Mapping[str, Any]) -> NumberedStorage:
    for attempt in range(_ATTEMPTS):
        try:
            with quiet():
                return NumberedStorage(url, options)
        except (IntegrityError, ProgrammingError):
            # Another run is making the same tables; after a while they are there.
            if attempt + 1 == _ATTEMPTS:
                raise
            time.sleep(0.2 * (attempt + 1))
    raise AssertionError


def _study_id(storage: NumberedStorage, name: str) -> int:
    try:
        return storage.get_study_id_from_name(name)
    except KeyError:
        pass
    try:
        return storage.create_new_study([StudyDirection.MAXIMIZE], name)
    except DuplicatedStudyError:  # a copy of the run was faster
        return storage.get_study_id_from_name(name)


def _outline(trial: FrozenTrial) -> FrozenTrial:
    said = trial.user_attrs
    return FrozenTrial(
        number=trial.number,
        state=trial.state,
        value=trial.value,
        datetime_start=trial.datetime_start,
        datetime_complete=trial.datetime_complete,
        params={},
        distributions={},
        user_attrs={name: said[name] for name in ASKED if name in said},
        system_attrs={},
        intermediate_values={},
        trial_id=-1,
    )


def _causes(error: BaseException) -> Generator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _reason(error: BaseException) -> str:
    """Return what a database said, on one line and without the statement, which may be long."""
    said = [one.orig for one in _causes(error) if isinstance(one, DBAPIError) and one.orig]
    return printable(cut(" ".join(str(said[0] if said else error).split())))


def _sqlite_code(error: BaseException) -> int | None:
    """Return SQLite's primary code of an error, None where it is none of SQLite's."""
    codes = (getattr(cause, "sqlite_errorcode", None) for cause in _causes(error))
    return next((code & 0xFF for code in codes if isinstance(code, int)), None)
