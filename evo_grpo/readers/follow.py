"""`evo-grpo follow`: gives readers of a run what they have not read yet, until the run has ended.

`run` starts it as a process beside itself where the settings name readers. Each reader has a
thread, so that one that hangs or waits for its server does not keep the others.
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
from evo_grpo.printable import raised
from evo_grpo.readers.database import NAME as OPTUNA
from evo_grpo.readers.database import DatabaseReader
from evo_grpo.readers.reader import Reader, feed
from evo_grpo.readers.report.run_page import ReportReader
from evo_grpo.readers.trackers.base import open_tracker
from evo_grpo.record.config import read_config
from evo_grpo.record.folder import expect_run, is_run, is_trained, refuse_planted
from evo_grpo.record.log import Cursor
from evo_grpo.record.names import COMPARE, COMPARED, REPORT_READER
from evo_grpo.settings import RecordConfig, RunConfig
from evo_grpo.settings.storage import check_driver, is_url
from evo_grpo.settings.trackers import KINDS, TrackerConfig, check_trackers

NAMES = (OPTUNA, REPORT_READER, *KINDS)
"""The readers that `to` may name."""
SECONDS_AFTER_END = 600.0
"""How long a reader may stand still once the run has ended."""
ATTEMPTS_AFTER_END = 3
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
"""Seconds between two attempts, which grow rarer while a server is gone."""


@dataclass(frozen=True)
class Followed:
    """How far a reader is with a run.

    Attributes:
        run: The run folder.
        name: Of the reader.
        id: What the run is called in what the reader feeds, such as the name of its study; empty
            where it has no name there.
        rounds: Finished rounds that it has read.
        error: Why it has not read all; None where it has.
    """

    run: Path
    name: str
    id: str
    rounds: int
    error: EvoGrpoError | None = None


def follow(
    run: str | Path, to: Sequence[str] = (), *, storage: str | None = None
) -> list[Followed]:
    """Give readers of a run what they have not read yet; of a run that trains, until it has ended.

    Args:
        run: The run folder, finished or not.
        to: Names of readers: "optuna" for the database of `record.storage`, "report", or a kind of
            tracker. None given are those that the settings of the run name.
        storage: Another database for "optuna" than that of the settings.

    Returns:
        How far each reader is.

    Raises:
        RunNotFoundError: It is no run folder.
        ConfigError: A reader is unknown, or its target cannot be used.
        EngineUnavailable: A package that a reader needs is not installed.
        EvoGrpoError: A reader could not read all; the others have.
    """
    if isinstance(to, str):
        raise ConfigError(f"to: expected a list of names, of {', '.join(NAMES)}, got {to!r}")
    found = follow_all(run, to, storage=storage, say=partial(warnings.warn, stacklevel=2))
    for one in found:
        if one.error is not None:
            raise one.error
    return found


def follow_all(
    run: str | Path, to: Sequence[str], *, storage: str | None, say: Callable[[str], None]
) -> list[Followed]:
    """Follow a run; see `follow`. An error of one reader is among what is returned.

    `say` gets sentences about what goes wrong meanwhile, from any thread.
    """
    folder = expect_run(run)
    for part in (folder, *_compared(folder)):
        refuse_planted(part)
    feedings = list(_feedings(folder, to, storage, say))
    for feeding in feedings:
        feeding.start()
    while any(feeding.is_alive() for feeding in feedings):
        for feeding in feedings:
            feeding.join(0.2)
        if _all_stand_still(folder, feedings):
            break
    return [feeding.followed() for feeding in feedings]


def _feedings(
    folder: Path, to: Sequence[str], storage: str | None, say: Callable[[str], None]
) -> Iterator[_Feeding]:
    config = read_config(folder)
    names = list(dict.fromkeys(to)) or config.record.readers
    if not names:
        raise ConfigError(
            f"{folder}: expected readers to follow the run with, got none, and its settings name "
            f"none; name some with --to, of {', '.join(NAMES)}"
        )
    for name in names:
        if name == OPTUNA:
            url = _database(folder, config, storage)
            # Another database than that of the settings has a place of its own.
            named = url == config.record.storage
            place = OPTUNA if named else f"{OPTUNA}-{_short(url)}"
            option = OPTUNA if named else f"{OPTUNA} --storage {url}"
            for part in (folder, *_compared(folder)):
                make = partial(DatabaseReader, part, url, say=say)
                label = f"optuna ({url})"
                yield _Feeding(part, place, make, say, again=True, label=label, option=option)
        elif name == REPORT_READER:
            yield _Feeding(folder, name, partial(ReportReader, folder), say, again=True)
        elif name in KINDS:
            settings = {tracker.kind: tracker for tracker in config.record.trackers}
            tracker = settings.get(name) or TrackerConfig(kind=name)
            check_trackers([tracker])
            yield _Feeding(folder, name, partial(open_tracker, tracker, folder, config), say)
        else:
            raise ConfigError(f"{folder}: expected readers of {', '.join(NAMES)}, got {name!r}")


def _database(folder: Path, config: RunConfig, storage: str | None) -> str:
    if storage is not None:
        RecordConfig(storage=storage)  # refuses what cannot be, and a password
    url = storage or config.record.storage
    if url is None or not is_url(url):
        raise ConfigError(
            f"{folder}: expected a database outside of the run folder for optuna, got "
            f"{url or 'null'} in record.storage; name one with --storage"
        )
    check_driver(url)
    return url


def _compared(folder: Path) -> Iterator[Path]:
    """Yield the folders of the populations of a comparison."""
    for name in COMPARED:
        if is_run(arm := folder / COMPARE / name):
            yield arm


def _short(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:8]


def _all_stand_still(folder: Path, feedings: Sequence[_Feeding]) -> bool:
    if is_trained(folder):
        for feeding in feedings:
            feeding.moved = time.monotonic()
        return False
    working = [feeding for feeding in feedings if feeding.is_alive()]
    return all(time.monotonic() - one.moved > SECONDS_AFTER_END for one in working)


@final
class _Feeding(threading.Thread):
    """Feeds one reader; after an error it makes another one, which goes on from the cursor.

    Args:
        run: The run folder.
        name: Of the reader.
        make: Makes the reader, given its id.
        say: Gets a sentence about an error that is tried again.
        again: The reader begins with the start of the log each time it is made.
        label: What sentences call it; empty for its name.
        option: What follows `--to` in the command that goes on; empty for its name.

    Attributes:
        moved: When an entry was read last, by the monotonic clock.
    """

    def __init__(
        self,
        run: Path,
        name: str,
        make: Callable[[str], Reader],
        say: Callable[[str], None],
        *,
        again: bool = False,
        label: str = "",
        option: str = "",
    ) -> None:
        # A daemon: a reader that hangs must not keep the process from its end.
        super().__init__(name=f"reader-{name}", daemon=True)
        self.moved = time.monotonic()
        self._run_folder = run
        self._make = make
        self._say = say
        self._again = again
        self._reader = name
        self._label = label or name
        self._remedy = f"go on with: evo-grpo follow {shlex.quote(str(run))} --to {option or name}"
        self._id = ""
        self._rounds = 0
        self._error: EvoGrpoError | None = None
        self._done = False

    def run(self) -> None:
        """Feed the reader until the run has ended."""
        wait, said, left = _FIRST_WAIT, "", ATTEMPTS_AFTER_END
        if not is_trained(self._run_folder):
            left = 1
        while not self._done:
            trained = is_trained(self._run_folder)
            try:
                self._feed()
            except BaseException as error:  # whatever a reader raises; the others go on
                left -= not trained
                if _is_final(error, trained) or left <= 0:
                    self._error = self._named(error)
                    if trained:  # else whoever waits for the readers hears of it now
                        self._say(str(self._error))
                    return
                if (why := _why(error)) != said:
                    said = why
                    self._say(f"{self._label}: {why}; it is tried again, and the run goes on")
                time.sleep(wait if trained else _FIRST_WAIT)
                wait = min(2 * wait, _LONGEST_WAIT)

    def followed(self) -> Followed:
        """Return how far the reader is."""
        error = self._error
        if error is None and not self._done:
            error = RunFailedError(
                f"{self._label}: nothing was read for {SECONDS_AFTER_END:g} s after the end of "
                f"the run; {self._remedy}"
            )
        return Followed(self._run_folder, self._label, self._id, self._rounds, error)

    def _feed(self) -> None:
        feed(
            self._run_folder,
            self._reader,
            self._make,
            follow=True,
            again=self._again,
            moved=self._move,
            say=self._say,
        )
        self._done = True

    def _move(self, cursor: Cursor, id: str) -> None:
        self.moved, self._rounds, self._id = time.monotonic(), cursor.rounds, id

    def _named(self, error: BaseException) -> EvoGrpoError:
        if isinstance(error, EvoGrpoError) and not isinstance(error, ConnectionError):
            return error
        return RunFailedError(f"{self._label}: {_why(error)}; {self._remedy}")


def _is_final(error: BaseException, trained: bool) -> bool:
    """Return whether another attempt would end the same way: a disk may have room again."""
    passing = isinstance(error, ConnectionError) or (trained and isinstance(error, RunFailedError))
    return isinstance(error, EvoGrpoError) and not passing


def _why(error: BaseException) -> str:
    return str(error) if isinstance(error, EvoGrpoError) else raised(error)
