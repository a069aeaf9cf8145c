"""Defines run(config) and resume(folder), which train a population. Read this file first.

resolve     resolve.py: what the settings leave to the machine, the Hub and earlier runs
prepare     assemble.py: the shared base, N agents, the environment, the settings of a round
play_round  population/round.py: train, evaluate, checkpoint, select, mutate, record, apply
finish      judge.py: choose the best agent and compare it once with the base, on the test split
"""

import logging
import shutil
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from evo_grpo.errors import EvoGrpoError
from evo_grpo.places import expanded
from evo_grpo.population.ranks.ranks import find_team, sharing_early_errors
from evo_grpo.population.round import Round, Steerer, next_slots, play_round
from evo_grpo.population.steps import Limit, RunWriter
from evo_grpo.record.files import reading
from evo_grpo.record.folder import read_config, with_objects
from evo_grpo.record.observer import Observer, ObserverList, check_observer
from evo_grpo.record.records import RoundRecord, outline
from evo_grpo.record.run_dir import RunDir, clear_run, refuse_taken
from evo_grpo.record.study import check_storage, study_is_written, write_study
from evo_grpo.record.summary import read_summary
from evo_grpo.settings import RunConfig
from evo_grpo.settings.yaml import as_config, to_yaml
from evo_grpo.training.assemble import Prepared, prepare, record_rewards
from evo_grpo.training.followers import Followers
from evo_grpo.training.judge import finish
from evo_grpo.training.recorded_inputs import check_same_run, read_inputs_of, refuse_own_code
from evo_grpo.training.resolve import checked_task, resolve
from evo_grpo.training.restoring import restore
from evo_grpo.training.resume_check import continued_inputs, record_changed, record_inputs
from evo_grpo.training.steering import RunSteering, take_up_requests
from evo_grpo.training.writer import FolderWriter, RankWriter, sees_folder
from evo_grpo.types import Slot

_log = logging.getLogger(__name__)


def run(
    config: RunConfig | str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    force: bool = False,
    observer: Observer | None = None,
    report: bool = False,
) -> Path:
    """Train and evolve a population; `report` keeps an HTML report of the run up to date."""
    with sharing_early_errors():  # the ranks are not connected yet: an error connects them
        config = as_config(config)
    observer = observer or Observer()
    check_observer(observer)
    team = find_team()
    where = None if out is None else expanded(out)
    with Followers(report=report) as followers, ExitStack() as stack, team.sharing_errors():
        check_same_run(team, "run", {}, config)
        if team.rank == 0:
            _check_place(where, config, force=force)
        config, task = resolve(config, team)
        team.wait_for_all()  # every rank finds its code and data before the folder is created
        folder, fresh = None, where is None or not where.exists()  # fresh: removed on failure
        if team.rank == 0:
            folder = stack.enter_context(_new_folder(where, config, force=force))
        with _removed_on_failure(folder, fresh=fresh):
            path = team.first(Path() if folder is None else folder.path)
            prepared = stack.enter_context(prepare(config, task, team))
        observers = _observers(observer, followers, folder)
        play_and_judge(config, path, folder, prepared, observers)
    return path


def resume(
    folder: str | Path,
    *,
    rounds: int | None = None,
    allow: Sequence[str] = (),
    observer: Observer | None = None,
    report: bool = False,
) -> Path:
    """Continue a stopped run after its last complete round; see `evo_grpo.resume` and `run`."""
    observer = observer or Observer()
    check_observer(observer)
    team = find_team()
    with Followers(report=report) as followers, ExitStack() as stack, team.sharing_errors():
        check_same_run(team, "resume", {"rounds": rounds, "allow": sorted(allow)})
        opened, changed = None, None
        if team.rank == 0:
            with reading(Path(folder)):
                opened = stack.enter_context(RunDir.open(Path(folder)))
                changed = continued_inputs(opened, rounds, allow, team)
        config = team.first(None if changed is None else changed.config)
        if config is None:  # the run is finished
            if opened is not None:  # a kill may have kept its end from the observers
                _tell_the_end(opened, observer, followers)
            return Path(folder)
        check_same_run(team, "resume", {}, config)
        task = checked_task(config, team)
        team.wait_for_all()  # all ranks pass their checks before anything is recorded
        if opened is not None and changed is not None:
            record_changed(opened, changed)
        prepared = stack.enter_context(prepare(config, task, team))
        observers = _observers(observer, followers, opened)
        play_and_judge(config, Path(folder), opened, prepared, observers)
    return Path(folder)


def _observers(observer: Observer, followers: Followers, folder: RunDir | None) -> Observer:
    """Return the observer of a run; on the rank with the run folder, it includes the followers."""
    return observer if folder is None else ObserverList((observer, followers))


def play_and_judge(
    config: RunConfig,
    path: Path,
    folder: RunDir | None,
    prepared: Prepared,
    observer: Observer,
    *,
    limit: Limit | None = None,
) -> tuple[Slot, ...]:
    """Play the missing rounds, compare the best agent with the base, and write the summary.

    Only the first rank has `folder`. `limit` may end the training of a round before its last step.
    Returns the slots of the agents that remain.
    """
    start, team = time.perf_counter(), prepared.cohort.team
    # Observers, environments and rewards of the user may change the working directory from here on.
    place = path.absolute()
    if folder is not None:
        folder.path = place
    steers = limit is None  # populations of `resume --compare` have a limit, and take no requests
    past = team.first(  # a new run's inputs are recorded here
        None if folder is None else _read_history(config, folder, prepared, steers=steers)
    )
    assert past is not None, "the first rank has the folder"
    rounds, taken_up = past
    slots = prepared.slots
    if rounds:
        with reading(place):
            slots = restore(prepared, rounds, place)  # those of the next round
        rounds[:-1] = map(outline, rounds[:-1])
    writer = _writer_of(config, place, folder, prepared)  # it has removed unfinished files
    team.wait_for_all()
    total = prepared.round_settings.population.rounds
    how = "resumed" if rounds else "started"
    _log.info("%s: %s at round %d of %d", path, how, len(rounds) + 1, total)
    observer.started(path, total, len(rounds), config)
    with writer:
        steering = None
        if folder is not None and steers:
            steering = RunSteering(path, folder, prepared.cohort.hp_config, writer.amend)
            for sentence in taken_up:
                observer.note(sentence)
        slots = play_rounds(
            prepared, slots, rounds, writer=writer, observer=observer, limit=limit,
            steering=steering, outlines=True,
        )  # fmt: skip
    # The writer is closed. A run that is unfinished here was ended by a request, for a resume.
    if not prepared.is_unfinished(rounds):
        observer.stage(len(rounds) - 1, "test", 0, 1)
        summary = finish(folder, prepared, rounds, start)
        _log.info("%s: finished after %.1f s", path, summary["wall_seconds"])
        observer.finished(summary)
    if folder is not None:
        _write_optuna_study(config, place, observer)
    team.wait_for_all()  # no rank leaves while another one still reads its agents or files
    return slots


def play_rounds(
    prepared: Prepared,
    slots: tuple[Slot, ...],
    rounds: list[RoundRecord],
    *,
    writer: RunWriter,
    observer: Observer,
    limit: Limit | None = None,
    steering: Steerer | None = None,
    outlines: bool = False,
) -> tuple[Slot, ...]:
    """Play all planned rounds, or fewer if a stop rule or a request ends the run before.

    Returns the slots of the agents that remain. New rounds are appended to `rounds`. With
    `outlines`, which needs a run in a folder, a round is reduced to its outline once the next round
    has been played.
    """
    prepared.between_rounds(slots, len(rounds))  # `Population.train` returns here after Ctrl-C
    while prepared.is_unfinished(rounds):
        round = Round(
            prepared.cohort, prepared.env, prepared.round_settings, slots, len(rounds), writer,
            observer, limit, rounds, steering=steering or Steerer(),
        )  # fmt: skip
        record = play_round(round)
        if outlines and rounds:
            rounds[-1] = outline(rounds[-1])
        rounds.append(record)
        slots = next_slots(record)
        prepared.between_rounds(slots, len(rounds))
        if record.ends_process:  # a person asked for this; the run stays unfinished
            break
    return slots


def _check_place(where: Path | None, config: RunConfig, *, force: bool) -> None:
    """Refuse a folder or a storage that cannot record the run; called on the first rank."""
    refuse_own_code(config, where)
    if where is not None:
        refuse_taken(where, force=force)
    check_storage(config.record.storage)


def _new_folder(where: Path | None, config: RunConfig, *, force: bool) -> RunDir:
    """Create a run folder with the settings; if `where` is None, the next free folder in runs/."""
    text = with_objects(to_yaml(config), config.env.objects())
    return RunDir.create(where, config.name, text, force=force)


@contextmanager
def _removed_on_failure(folder: RunDir | None, *, fresh: bool) -> Generator[None]:
    """If the block fails, clear a new run folder for a retry, or delete the folder if `fresh`."""
    try:
        yield
    except (Exception, KeyboardInterrupt):  # code of the user may raise anything
        if folder is not None:
            clear_run(folder.path)
            if fresh:
                shutil.rmtree(folder.path)
        raise


def _read_history(
    config: RunConfig, folder: RunDir, prepared: Prepared, *, steers: bool
) -> tuple[list[RoundRecord], list[str]]:
    """Record a run's inputs, update `checkpoints/best`, and, if `steers`, carry out old requests.

    Returns the rounds, and a sentence for each request.
    """
    with reading(folder.path):
        record_inputs(folder, config, prepared.objects)
        rounds = folder.rounds()
        if rounds and _keeps_best(config):
            folder.keep_best()
    sentences = list[str]()
    if steers:
        unfinished = prepared.is_unfinished(rounds)
        sentences = take_up_requests(
            folder, rounds, prepared.cohort.hp_config, unfinished=unfinished
        )
    return rounds, sentences


def _keeps_best(config: RunConfig) -> bool:
    return config.record.keeps_best_apart(archive=config.evolve.keeps_archive)


def _writer_of(
    config: RunConfig, path: Path, folder: RunDir | None, prepared: Prepared
) -> RunWriter:
    """Remove unfinished files, and return this rank's writer; call this after restoring the run."""
    team, env = prepared.cohort.team, prepared.env
    shared = sees_folder(path, team)
    record_rewards(env, path, team, writes=folder is not None, shared=shared)
    if folder is None:
        return RankWriter(path, shared=shared, idle=prepared.cohort.trains_jointly)
    # Drop only after restoring: if restoring fails, the unfinished files may be all that is left.
    folder.drop_unfinished()
    writer = FolderWriter(folder, keep=config.record.checkpoints, keep_best=_keeps_best(config))
    if folder.rounds():
        writer.follow_up()
    return writer


def _write_optuna_study(config: RunConfig, place: Path, observer: Observer) -> None:
    """Write the Optuna study of a run that has ended, unless the readers of the run write it."""
    if not config.record.optuna or config.record.readers:
        return
    try:
        write_study(place, read_inputs_of(place).id)
    except EvoGrpoError as error:  # nothing of the run is lost
        _log.warning("%s", error)
        observer.note(str(error))


def _tell_the_end(folder: RunDir, observer: Observer, readers: Observer) -> None:
    """Notify observers that a run is finished, write a missing Optuna study, start the readers."""
    summary = read_summary(folder.path)
    if summary is None:
        return
    observer.finished(summary)
    config = read_config(folder.path)
    if not study_is_written(folder.path):
        _write_optuna_study(config, folder.path, observer)
    readers.started(folder.path, summary["rounds"], 0, config)
