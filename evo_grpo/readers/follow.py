"""`evo-grpo follow` and `evo_grpo.follow`: feed the readers of a run until it has ended.

A run whose settings name readers starts this command as a second process. Each reader runs in a
separate thread, so that a reader that hangs or waits for its server does not delay other readers.
"""

from __future__ import annotations

import hashlib
import shlex
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

from evo_grpo.errors import ConfigError, EvoGrpoError, RunFailedError
from evo_grpo.escaping import error_text
from evo_grpo.readers.reader import Reader, feed, id_of
from evo_grpo.readers.report.run_page import ReportReader
from evo_grpo.readers.trackers.base import open_tracker
from evo_grpo.record.folder import expect_run, is_run, is_trained, read_config, refuse_links_in_run
from evo_grpo.record.log import Cursor
from evo_grpo.record.names import COMPARE, COMPARED, REPORT_READER, STUDY
from evo_grpo.record.study import OPTUNA, StudyReader, study_name
from evo_grpo.settings import RecordConfig
from evo_grpo.settings.record import check_driver, is_url
from evo_grpo.settings.trackers import KINDS, TrackerConfig, check_trackers
from evo_grpo.training.recorded_inputs import read_inputs_of

NAMES = (OPTUNA, REPORT_READER, *KINDS)
"""Names of the readers: the values of `to`."""
SECONDS_AFTER_END = 600.0
"""Seconds without progress after which a reader counts as hanging, once the run has ended."""
ATTEMPTS_AFTER_END = 3
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
"""Seconds of the first and of the longest wait between two attempts; the wait doubles each time."""


@dataclass(frozen=True)
class Followed:
    """The progress of a reader of a run.

    Attributes:
        id: Name of the run in the target of the reader, such as the name of its study, or empty.
        rounds: Number of finished rounds that the reader has read.
        error: The error that stopped the reader, else None.
    """

    run: Path
    name: str
    id: str
    rounds: int
    error: EvoGrpoError | None = None


def follow(
    run: str | Path,
    to: Sequence[str] = (),
    *,
    storage: str | None = None,
    outside: bool = False,
) -> list[Followed]:
    """Feed readers of a run with the entries that they have not read, until the run has ended.

    Args:
        run: The run folder, finished or not.
        to: Names of readers: "optuna" (trials, stored as `record.storage` says), "report", or a
            kind of tracker. An empty sequence stands for the readers in the settings of the run.
        storage: Database for "optuna", in place of `record.storage`.
        outside: Use folders outside of the run folder, servers and databases that the settings of
            the run name. By default these are refused: the settings may come from a stranger.

    Raises:
        RunNotFoundError: `run` is not a run folder.
        ConfigError: A reader is unknown, or its target cannot be used.
        EngineUnavailable: A package that a reader needs is not installed.
        EvoGrpoError: A reader failed; the other readers have read the whole log.
    """
    if isinstance(to, str):
        raise ConfigError(f"to: expected a list of names, of {', '.join(NAMES)}, got {to!r}")
    warn = partial(warnings.warn, stacklevel=2)
    readers = follow_all(run, to, storage=storage, outside=outside, warn=warn)
    for reader in readers:
        if reader.error is not None:
            raise reader.error
    return readers


def study_of(run: str | Path) -> tuple[str, str] | None:
    """Return name and storage URL of a run's study; None for a journal in the run folder."""
    folder = expect_run(run)
    config = read_config(folder)
    storage = config.record.storage
    if storage is None:
        return None
    name = study_name(config.name, read_inputs_of(folder).id)
    if not is_url(storage):
        return name, f"sqlite:///{folder / STUDY}"
    saved = id_of(folder, OPTUNA)
    return saved if saved.startswith(f"{name}-") else name, storage


def follow_all(
    run: str | Path,
    to: Sequence[str],
    *,
    storage: str | None,
    outside: bool = False,
    warn: Callable[[str], None],
) -> list[Followed]:
    """Follow a run as `follow` does, and return the errors of readers instead of raising them.

    `warn` is called from several threads: with each new error of a reader, and if a reader waits
    for another process that feeds it.
    """
    folder = expect_run(run)
    for run_folder in (folder, *_compared(folder)):
        refuse_links_in_run(run_folder)
    feedings = list(_feedings(folder, to, storage, warn, outside=outside))
    for feeding in feedings:
        feeding.start()
    while any(feeding.is_alive() for feeding in feedings):
        for feeding in feedings:
            feeding.join(0.2)
        if _all_hang(folder, feedings):
            break
    return [feeding.followed() for feeding in feedings]


def _feedings(
    folder: Path,
    to: Sequence[str],
    storage: str | None,
    warn: Callable[[str], None],
    *,
    outside: bool,
) -> Iterator[_Feeding]:
    config = read_config(folder)
    flag = " --outside" if outside else ""
    names = list(dict.fromkeys(to)) or config.record.readers
    if not names:
        raise ConfigError(
            f"{folder}: expected the name of a reader, got none, and the settings of the run name "
            f"none; name readers with --to, of {', '.join(NAMES)}"
        )
    for name in names:
        if name == OPTUNA:
            url = _database(folder, config.record.storage, storage, outside=outside)
            reader, option, label = OPTUNA, f"{OPTUNA}{flag}", f"optuna ({url})" if url else OPTUNA
            if url is not None and url != config.record.storage:
                # A database that the settings do not name has a cursor file of its own.
                reader = f"{OPTUNA}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
                option = f"{OPTUNA} --storage {url}"
            for run_folder in (folder, *_compared(folder)):
                make = partial(StudyReader, run_folder, read_inputs_of(run_folder).id, url)
                yield _Feeding(
                    run_folder, reader, make, warn, from_start=True, label=label, option=option
                )
        elif name == REPORT_READER:
            yield _Feeding(folder, name, partial(ReportReader, folder), warn, from_start=True)
        elif name in KINDS:
            settings = {tracker.kind: tracker for tracker in config.record.trackers}
            tracker = settings.get(name) or TrackerConfig(kind=name)
            if not outside and (target := _elsewhere(tracker, folder)):
                raise _not_inside(folder, f"record.trackers has {name} write to {target}")
            check_trackers([tracker])
            make = partial(open_tracker, tracker, folder, config)
            yield _Feeding(folder, name, make, warn, option=f"{name}{flag}")
        else:
            raise ConfigError(f"{folder}: expected readers of {', '.join(NAMES)}, got {name!r}")


def _elsewhere(tracker: TrackerConfig, run: Path) -> str:
    """Return the target of a tracker, or "" if the target is inside the run folder."""
    if tracker.online or tracker.server is not None:
        return tracker.server or "its service"
    folder = Path(tracker.folder or run).expanduser().resolve()
    return "" if folder.is_relative_to(run.resolve()) else str(folder)


def _not_inside(run: Path, what: str, more: str = "") -> ConfigError:
    return ConfigError(
        f"{run}: {what}, outside of the run folder, whose settings may come from somebody else; "
        f"allow it with --outside (outside=True in Python){more}"
    )


def _database(
    folder: Path, recorded: str | None, storage: str | None, *, outside: bool
) -> str | None:
    """Return the URL of the database for trials; None if they are stored in the run folder."""
    if storage is not None:
        RecordConfig(storage=storage)  # raises for an invalid URL or one with a password
        if not is_url(storage):
            raise ConfigError(
                f"storage: expected the URL of a database, got {storage}; leave it out to write "
                "the trials where record.storage has them"
            )
    url = storage or recorded
    if url is None or not is_url(url):
        return None
    if storage is None and not outside:
        reason = f"record.storage names the database {url}"
        raise _not_inside(folder, reason, f", or name it with --storage {url}")
    check_driver(url)
    return url


def _compared(folder: Path) -> Iterator[Path]:
    """Yield the folders of the populations with which `resume --compare` compares a run."""
    for name in COMPARED:
        if is_run(arm := folder / COMPARE / name):
            yield arm


def _all_hang(folder: Path, feedings: Sequence[_Feeding]) -> bool:
    if is_trained(folder):
        for feeding in feedings:
            feeding.last_progress = time.monotonic()
        return False
    working = [feeding for feeding in feedings if feeding.is_alive()]
    return all(time.monotonic() - thread.last_progress > SECONDS_AFTER_END for thread in working)


@final
class _Feeding(threading.Thread):
    """A thread that feeds one reader, and constructs the reader again after an error.

    The arguments are those of `feed`, and two more: `label` names the reader in messages, and
    `option` is the value of `--to` in the command that messages suggest.
    """

    def __init__(
        self,
        run: Path,
        name: str,
        make: Callable[[str], Reader],
        warn: Callable[[str], None],
        *,
        from_start: bool = False,
        label: str = "",
        option: str = "",
    ) -> None:
        # A daemon thread: the process can end although a reader hangs.
        super().__init__(name=f"reader-{name}", daemon=True)
        self.last_progress = time.monotonic()
        self._folder, self._warn, self._label = run, warn, label or name
        self._feed = partial(
            feed, run, name, make, follow=True, from_start=from_start,
            on_progress=self._note_progress, warn=warn,
        )  # fmt: skip
        command = f"evo-grpo follow {shlex.quote(str(run))} --to {option or name}"
        self._remedy = f"continue with: {command}"
        self._id, self._rounds = "", 0
        self._error: EvoGrpoError | None = None
        self._done = False

    def run(self) -> None:
        """Feed the reader until the run has ended."""
        wait, last_reason = _FIRST_WAIT, ""
        attempts = ATTEMPTS_AFTER_END if is_trained(self._folder) else 1
        while not self._done:
            trained = is_trained(self._folder)
            try:
                self._feed()
                self._done = True
            except BaseException as error:  # any error of a reader, so that the others continue
                attempts -= not trained
                if _is_final(error, trained) or attempts <= 0:
                    self._error = self._named(error)
                    if trained:  # after the end of the run, `followed` returns the error soon
                        self._warn(str(self._error))
                    return
                if (reason := _reason(error)) != last_reason:
                    last_reason = reason
                    self._warn(f"{self._label}: {reason}; retrying while the run continues")
                time.sleep(wait if trained else _FIRST_WAIT)
                wait = min(2 * wait, _LONGEST_WAIT)

    def followed(self) -> Followed:
        """Return the progress of the reader."""
        error = self._error
        if error is None and not self._done:
            error = RunFailedError(
                f"{self._label}: nothing was read for {SECONDS_AFTER_END:g} s after the end of "
                f"the run; {self._remedy}"
            )
        return Followed(self._folder, self._label, self._id, self._rounds, error)

    def _note_progress(self, cursor: Cursor, id: str) -> None:
        self.last_progress, self._rounds, self._id = time.monotonic(), cursor.rounds, id

    def _named(self, error: BaseException) -> EvoGrpoError:
        if isinstance(error, EvoGrpoError) and not isinstance(error, ConnectionError):
            return error
        return RunFailedError(f"{self._label}: {_reason(error)}; {self._remedy}")


def _is_final(error: BaseException, trained: bool) -> bool:
    """Return whether an error ends a reader for good; after other errors, it is fed again.

    Any EvoGrpoError ends it, except a ConnectionError and, while the run trains (`trained`), a
    RunFailedError, such as for a full disk.
    """
    passing = isinstance(error, ConnectionError) or (trained and isinstance(error, RunFailedError))
    return isinstance(error, EvoGrpoError) and not passing


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, EvoGrpoError) else error_text(error)
