"""Where the trials of a run are kept: in its folder, or in a database that runs share.

In the folder the writer of rounds keeps them up with the rounds. A database gets them from a thread
of its own, and from `deliver` what a run left over.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from evo_grpo import settings as configuration
from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.inputs import read_inputs_of, run_id
from evo_grpo.record.delivery import Delivery
from evo_grpo.record.folder import expect_run, is_run, remove
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.names import COMPARE, COMPARED, CONFIG, STUDY, STUDY_ASIDES
from evo_grpo.record.run_dir import RunDir
from evo_grpo.record.sending import Sender
from evo_grpo.record.study import RunStudy, study_name
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.settings import RecordConfig, RunConfig
from evo_grpo.settings.storage import check_driver, is_url

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delivered:
    """What was delivered of a run.

    Attributes:
        run: The run folder.
        study: Name of its study.
        storage: The database, as `record.storage` names it.
        added: Trials that were added.
        rounds: Rounds whose trials are there.
    """

    run: Path
    study: str
    storage: str
    added: int
    rounds: int


def deliver(run: str | Path, *, storage: str | None = None) -> list[Delivered]:
    """Bring the trials of a run into the database of `record.storage`, as far as they lack there.

    A run does so while it trains. This is for what it could not deliver, and for a run that kept
    its trials in its folder. The populations of a comparison with it are delivered too.

    Args:
        run: The run folder, which no other process uses.
        storage: Another database than that of the run's settings.

    Returns:
        What was delivered, the run first.

    Raises:
        ConfigError: The run names no database, or it cannot be used.
        EngineUnavailable: Its driver is not installed.
        RunNotFoundError: It is no run folder.
        RunDirError: Another process uses the folder.
    """
    folder = expect_run(run)
    if storage is not None:
        RecordConfig(storage=storage)
    return [_deliver_all(arm, storage) for arm in (folder, *_compared(folder))]


def study_of(run: str | Path) -> tuple[str, str] | None:
    """Return name and database of the study of a run, as Optuna takes them; None for a journal.

    Args:
        run: The run folder.
    """
    folder = expect_run(run)
    record = (config := _config(folder)).record
    if record.storage is None:
        return None
    where = record.storage if is_url(record.storage) else f"sqlite:///{folder / STUDY}"
    return study_name(config, read_inputs_of(folder).id), where


def deliver_rest(opened: RunDir) -> None:
    """Deliver what a finished run could not; where that is not possible now, a warning says so."""
    config = _config(opened.path)
    if not is_url(config.record.storage):
        return
    try:
        _send(opened, config, str(config.record.storage))
    except (ConfigError, EngineUnavailable) as error:
        warnings.warn(str(error), UserWarning, stacklevel=2)


def check_storage(config: RunConfig) -> None:
    """Refuse a database that cannot be used, before the first round.

    Raises:
        ConfigError: It is not there, refuses, or is of another version of Optuna.
        EngineUnavailable: Its driver is not installed.
    """
    if is_url(config.record.storage):
        _check(str(config.record.storage))


@contextmanager
def keeping_trials(
    opened: RunDir, config: RunConfig, space: HyperparameterConfig
) -> Generator[tuple[Lineage | None, Delivery | None]]:
    """Keep the trials of a run while it trains.

    Args:
        opened: The open run folder.
        config: Its settings.
        space: The hyperparameters that mutate and their bounds.

    Yields:
        The study in the folder, or the delivery to a database; neither where none is wanted.

    Raises:
        EngineUnavailable: The driver of the database is not installed.
        CheckpointError: The study in the folder is damaged.
    """
    storage = config.record.storage
    if not config.record.optuna:
        yield None, None
    elif storage is None or not is_url(storage):
        with closing(_lineage(opened, config, space)) as lineage:
            yield lineage, None
    else:
        check_driver(storage)
        # Loaded here: a round may fork processes, which must not happen in the middle of an import.
        import_module("evo_grpo.record.database")

        command = f"evo-grpo deliver {opened.path}"
        with Delivery(_sender(opened, config, storage), opened.length, command) as delivery:
            yield None, delivery


def _lineage(opened: RunDir, config: RunConfig, space: HyperparameterConfig) -> Lineage:
    """Open the study in a run folder; one that does not say what the rounds do is written anew."""
    file = opened.journal if config.record.storage is None else opened.study
    lineage = _opened_lineage(opened, config, space)
    if not lineage.differing(opened.rounds()):
        return lineage
    _log.warning("%s: its trials are not those of the rounds; written anew", file)
    lineage.close()
    for path in (file, *map(opened.path.joinpath, STUDY_ASIDES)):
        remove(path)
    return _opened_lineage(opened, config, space)


def _opened_lineage(opened: RunDir, config: RunConfig, space: HyperparameterConfig) -> Lineage:
    if config.record.storage is None:
        return Lineage(opened.journal, config.name, space)
    from evo_grpo.record.database import open_file  # with Optuna, which takes a second

    study = _study(opened, config)
    return Lineage(open_file(opened.study, study.name, study.attributes), hp_config=space)


def _study(opened: RunDir, config: RunConfig) -> RunStudy:
    return RunStudy(config, run_id(opened), lambda: run_id(opened, anew=True))


def _deliver_all(folder: Path, storage: str | None) -> Delivered:
    config = _config(folder)
    where = storage or config.record.storage
    if where is None or not is_url(where):
        raise ConfigError(
            f"{folder}: expected a run with a database outside of its folder in record.storage, "
            f"got {where or 'null'}; name one with --storage"
        )
    _check(where)
    with RunDir.open(folder) as opened:
        return _send(opened, config, where)


def _send(opened: RunDir, config: RunConfig, url: str) -> Delivered:
    from evo_grpo.record.database import Unreachable

    with _sender(opened, config, url) as sender:
        try:
            sender.send(opened.length)
        except Unreachable as error:
            raise _unusable(url, str(error)) from error
        for note in sender.notes:
            warnings.warn(note, UserWarning, stacklevel=3)
        return Delivered(opened.path, sender.study.name, url, sender.added, sender.rounds)


def _sender(opened: RunDir, config: RunConfig, url: str) -> Sender:
    return Sender(opened.path, url, _study(opened, config), config.agents().search_space())


def _check(url: str) -> None:
    check_driver(url)
    from evo_grpo.record.database import Unreachable, check_url

    try:
        check_url(url)
    except Unreachable as error:
        raise _unusable(url, str(error)) from error


def _unusable(url: str, why: str) -> ConfigError:
    if url.startswith("sqlite"):
        remedy = "create the folder of the file, or give permission"
    else:
        remedy = (
            "start the server, and check host, port, user and database; the password comes from "
            "PGPASSWORD or ~/.pgpass"
        )
    return ConfigError(f"record.storage: {url} cannot be used: {why}; {remedy}")


def _config(folder: Path) -> RunConfig:
    return configuration.load(folder / CONFIG)


def _compared(folder: Path) -> Iterator[Path]:
    """Yield the folders of the populations of a comparison."""
    for name in COMPARED:
        if is_run(arm := folder / COMPARE / name):
            yield arm
