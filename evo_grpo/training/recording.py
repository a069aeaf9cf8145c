"""The folder of a run: its creation, the recorded rounds, and the writers of rounds and study."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evo_grpo.errors import EvoGrpoError
from evo_grpo.population.steps import RunWriter
from evo_grpo.record.files import reading
from evo_grpo.record.folder import read_config, with_objects
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.run_dir import RunDir, clear_run, refuse_taken
from evo_grpo.record.study import check_storage, study_is_written, write_study
from evo_grpo.record.summary import earlier_ends, read_summary
from evo_grpo.settings import RunConfig
from evo_grpo.settings.yaml import to_yaml
from evo_grpo.training.assemble import Prepared
from evo_grpo.training.environments import record_rewards
from evo_grpo.training.recorded_inputs import read_inputs_of, refuse_own_code
from evo_grpo.training.resume_check import record_inputs
from evo_grpo.training.steering import resumed
from evo_grpo.training.writer import FolderWriter, RankWriter, sees_folder

_log = logging.getLogger(__name__)


def check_place(where: Path | None, config: RunConfig, *, force: bool) -> None:
    """Refuse a folder or a storage that cannot record the run; called on the first rank."""
    refuse_own_code(config, where)
    if where is not None:
        refuse_taken(where, force=force)
    check_storage(config.record.storage)


def new_folder(where: Path | None, config: RunConfig, *, force: bool) -> RunDir:
    """Create the folder of a run, with its settings; None takes the next free one in runs/."""
    text = with_objects(to_yaml(config), config.env.objects())
    return RunDir.create(where, config.name, text, force=force)


@contextmanager
def removed_on_failure(folder: RunDir | None, *, fresh: bool) -> Generator[None]:
    """Remove a new run folder if set-up fails, so that a retry can use it."""
    try:
        yield
    except (EvoGrpoError, KeyboardInterrupt):
        if folder is not None:
            clear_run(folder.path)
            if fresh:
                shutil.rmtree(folder.path)
        raise


@dataclass(frozen=True)
class Past:
    """The recorded rounds of a run, read on the first rank.

    Attributes:
        rounds: The whole records of the finished rounds; later rounds are appended.
        earlier_summaries: Summaries of the run from before it was extended by more rounds.
        recorded_requests: Number of requests in the record of the last round; later ones are new.
    """

    rounds: list[RoundRecord]
    earlier_summaries: list[dict[str, Any]]
    recorded_requests: int


def take_up_past(config: RunConfig, folder: RunDir, prepared: Prepared, *, steers: bool) -> Past:
    """Record a run's inputs, read its rounds, add new requests, and update `checkpoints/best`."""
    with reading(folder.path):
        record_inputs(folder, config, prepared.objects)
        rounds = folder.rounds()
        if rounds and _keeps_best(config):
            folder.keep_best()
        past = Past(rounds, earlier_ends(folder.path), len(rounds[-1].steering) if rounds else 0)
    if steers and rounds and prepared.is_unfinished(rounds):
        rounds[-1] = resumed(folder, rounds, prepared.cohort.hp_config)
    return past


def _keeps_best(config: RunConfig) -> bool:
    return config.record.keeps_best_apart(archive=config.evolve.keeps_archive)


def writer_of(
    config: RunConfig, path: Path, folder: RunDir | None, prepared: Prepared
) -> RunWriter:
    """Return the writer of the rounds of a run; call this after the run is restored."""
    team, env = prepared.cohort.team, prepared.env
    shared = sees_folder(path, team)
    record_rewards(env, path, team, writes=folder is not None, shared=shared)
    if folder is None:
        return RankWriter(path, shared=shared, idle=prepared.cohort.together)
    # Drop only after restoring: if restoring fails, the unfinished files may be all that is left.
    folder.drop_unfinished()
    writer = FolderWriter(folder, keep=config.record.checkpoints, keep_best=_keeps_best(config))
    if folder.rounds():
        writer.follow_up()
    return writer


def write_optuna_study(config: RunConfig, place: Path, observer: Observer) -> None:
    """Write the study of a run that has ended, unless the run's reader does."""
    if not config.record.optuna or config.record.readers:
        return
    try:
        write_study(place, read_inputs_of(place).id)
    except EvoGrpoError as error:  # nothing of the run is lost
        _log.warning("%s", error)
        observer.note(str(error))


def tell_the_end(folder: RunDir, observer: Observer, readers: Observer) -> None:
    """Tell observers of the end of a finished run, in case a killed process did not."""
    summary = read_summary(folder.path)
    if summary is None:
        return
    observer.finished(summary)
    config = read_config(folder.path)
    if not study_is_written(folder.path):
        write_optuna_study(config, folder.path, observer)
    readers.started(folder.path, summary["rounds"], 0, config)
