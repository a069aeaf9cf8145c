"""run(config) and resume(folder): from a YAML file to a leaderboard. Read this file first.

prepare     assemble.py: the shared base, N agents, the environment, the settings of a round
play_round  population/round.py: train, evaluate, checkpoint, select, mutate, record, apply
judge       judge.py: the best of the run, compared with the base on the test split, once
"""

from __future__ import annotations

import logging
import shutil
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evo_grpo import settings as configuration
from evo_grpo.errors import ConfigError, EvoGrpoError, RunDirError
from evo_grpo.population.checkpoints.write import snapshot_agent
from evo_grpo.population.plan import ends_by_request
from evo_grpo.population.ranks.ranks import find_team, sharing_early_errors
from evo_grpo.population.ranks.team import Team
from evo_grpo.population.round import Steerer, next_slots, play_round
from evo_grpo.population.steps import Limit, RunWriter
from evo_grpo.record.config import read_config
from evo_grpo.record.files import reading, sync_into, writing
from evo_grpo.record.folder import clear_run, config_text, refuse_objects, refuse_taken
from evo_grpo.record.leaderboard import write_csv
from evo_grpo.record.names import BASELINE, MEAN
from evo_grpo.record.observer import Observer, ObserverList, check_observer
from evo_grpo.record.records import RoundRecord, outline
from evo_grpo.record.run_dir import RunDir
from evo_grpo.record.study import FolderStudy, check_storage
from evo_grpo.record.summary import read_summary
from evo_grpo.schema.validation import shown
from evo_grpo.settings import RunConfig
from evo_grpo.settings.storage import is_url
from evo_grpo.settings.trackers import check_trackers
from evo_grpo.training.assemble import (
    Prepared,
    check_found,
    check_ranks,
    prepare,
    task_of,
    with_shards,
)
from evo_grpo.training.extending import check_rounds, with_plan
from evo_grpo.training.followers import Followers
from evo_grpo.training.inputs.differences import (
    Changed,
    begun_extension,
    compare_inputs,
    record_changes,
    record_inputs,
    was_the_end,
)
from evo_grpo.training.inputs.recorded_inputs import read_inputs_of, refuse_own_code
from evo_grpo.training.inputs.same_on_ranks import check_same_files, check_same_run
from evo_grpo.training.judge import Finalist, candidates_summary, choose, finalists, judge
from evo_grpo.training.restoring import restore
from evo_grpo.training.steering import RunSteering, resumed
from evo_grpo.training.writer import FolderWriter, RankWriter, keep_best_of, sees_folder
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
    """Train and evolve a population from its first round to its last; see `evo_grpo.run`.

    With `report`, a page of the run is kept up to date while it trains.
    """
    with sharing_early_errors():
        config = as_config(config)
    observer = observer or Observer()
    check_observer(observer)
    team = find_team()
    where = None if out is None else Path(out)
    with Followers(report=report) as followers, ExitStack() as stack, team.sharing_errors():
        check_same_run(team, "run", {}, config)
        config = with_shards(config, team)
        if team.rank == 0:
            check_place(where, config, force=force)
        check_trackers(config.record.trackers)
        check_found(config)
        task = task_of(config)
        team.wait_for_all()  # before there is a folder: each rank finds its own code and data
        fresh, folder = where is None or not where.exists(), None
        if team.rank == 0:
            text = configuration.to_yaml(config)
            folder = stack.enter_context(RunDir.create(where, config.name, text, force=force))
        with _removed_on_failure(folder, fresh=fresh):
            path = team.first(Path() if folder is None else folder.path)
            prepared = stack.enter_context(prepare(config, task, team))
        play_and_judge(config, path, folder, prepared, _watching(observer, followers, folder))
    return path


def check_place(where: Path | None, config: RunConfig, *, force: bool) -> None:
    """Refuse a folder or a storage in which a run cannot be recorded; called on the first rank."""
    refuse_own_code(config, where)
    if where is not None and not force:
        refuse_taken(where)
    check_storage(config)


@contextmanager
def _removed_on_failure(folder: RunDir | None, *, fresh: bool) -> Generator[None]:
    """Remove a new run folder if set-up fails, so that a retry can use it."""
    try:
        yield
    except (EvoGrpoError, KeyboardInterrupt):
        if folder is not None:
            clear_run(folder.path)
            if fresh:
                shutil.rmtree(folder.path)
        raise


def resume(
    folder: str | Path,
    *,
    rounds: int | None = None,
    allow: Sequence[str] = (),
    observer: Observer | None = None,
    report: bool = False,
) -> Path:
    """Continue a stopped run after its last whole round; see `evo_grpo.resume` and `run`."""
    observer = observer or Observer()
    check_observer(observer)
    team = find_team()
    with Followers(report=report) as followers, ExitStack() as stack, team.sharing_errors():
        check_same_run(team, "resume", {"rounds": rounds, "allow": sorted(allow)})
        opened, changed = None, None
        if team.rank == 0:
            with reading(Path(folder)):
                opened = stack.enter_context(RunDir.open(Path(folder)))
                changed = _go_on(opened, rounds, allow, team)
        config = team.first(None if changed is None else changed.config)
        if config is None:
            if opened is not None and (summary := read_summary(opened.path)) is not None:
                observer.finished(summary)
                # Readers may lack the end of the run, or all of it.
                followers.started(Path(folder), summary["rounds"], 0, read_config(Path(folder)))
            return Path(folder)
        check_trackers(config.record.trackers)
        check_same_files(team, config)
        team.wait_for_all()  # before anything is recorded
        if opened is not None and changed is not None:
            _record(opened, changed)
        prepared = stack.enter_context(prepare(config, None, team))
        watching = _watching(observer, followers, opened)
        play_and_judge(config, Path(folder), opened, prepared, watching)
    return Path(folder)


def _watching(observer: Observer, followers: Followers, folder: RunDir | None) -> Observer:
    """Return who follows a run; readers follow the rank that has its folder."""
    return observer if folder is None else ObserverList((observer, followers))


def _go_on(opened: RunDir, rounds: int | None, allow: Sequence[str], team: Team) -> Changed | None:
    """Return what a run goes on with, None if it is over; nothing is recorded yet."""
    summary, begun = read_summary(opened.path), begun_extension(opened)
    if summary is not None and begun is None and rounds in (None, summary["rounds"]):
        return None
    config, played = _recorded_config(opened), opened.rounds()
    check_ranks(config, team)
    if not played:
        check_storage(config)
    if rounds is not None:
        check_rounds(rounds, len(played), begun or config.population.rounds)
    wanted = begun if rounds is None else rounds
    if wanted is not None:
        config = config.replace(population=config.population.replace(rounds=wanted))
    changed = compare_inputs(opened, config, rounds=wanted, allow=allow)
    for note in changed.notes:
        warnings.warn(note, UserWarning, stacklevel=2)
    return changed


def _record(opened: RunDir, changed: Changed) -> None:
    """Record what a run goes on with."""
    # First what is to come: stopped in between, a resume goes on with it.
    record_changes(opened, changed)
    if changed.extended:
        opened.write_config(configuration.to_yaml(changed.config))
    if was_the_end(opened):
        opened.reopen(with_plan(changed.config, opened.rounds()))


def _recorded_config(opened: RunDir) -> RunConfig:
    """Return the settings of a run folder, where a resume can follow them."""
    refuse_objects(
        opened.path,
        "so it cannot be resumed from here; in Python, make the population again, or load its "
        "agents from checkpoints/ with load_checkpoint, and call train",
    )
    if config_text(opened.path).startswith(BASELINE):
        above = opened.path.parent.parent
        raise RunDirError(
            f"{opened.path}: it is part of the comparison of {above} and ends by tokens, not "
            f"by rounds; continue with: evo-grpo resume {above} --compare"
        )
    return read_config(opened.path)


def play_and_judge(
    config: RunConfig,
    path: Path,
    folder: RunDir | None,
    prepared: Prepared,
    observer: Observer,
    *,
    limit: Limit | None = None,
) -> tuple[Slot, ...]:
    """Play the rounds that a run folder lacks, compare best agent and base, write the summary.

    The first rank has the folder open; on the others it is None. A limit ends the training of a
    round before all its steps.

    Returns:
        The slots of the agents that are left.
    """
    start, team = time.perf_counter(), prepared.cohort.team
    # Code of the user's runs from here on, and may change the working folder.
    place = path.absolute()
    if folder is not None:
        folder.path = place
    steers = limit is None  # a population that is compared trains by itself
    past = team.first(None if folder is None else _past(config, folder, prepared, steers=steers))
    assert past is not None, "the first rank has the folder"
    rounds, slots = past.rounds, prepared.slots
    if rounds:
        with reading(place):
            slots = restore(prepared, rounds, place)
        rounds[:-1] = map(outline, rounds[:-1])
    writer, study = _writer(config, place, folder, prepared)
    total = prepared.round_settings.population.rounds
    how = "resumed" if rounds else "started"
    _log.info("%s: %s at round %d of %d", path, how, len(rounds) + 1, total)
    observer.started(path, total, len(rounds), config)
    with writer:
        steering = None
        if folder is not None and steers:
            steering = RunSteering(path, folder, prepared.cohort.hp_config, writer.amend)
            steering.begin(rounds, past.steered, observer)
        slots = play_rounds(
            prepared,
            slots,
            rounds,
            writer=writer,
            observer=observer,
            limit=limit,
            steering=steering,
            outlines=True,
        )
    if not _goes_on(prepared, rounds):  # else a person has asked that the process ends
        observer.stage(len(rounds) - 1, "test", 0, 1)
        summary = _finish(folder, prepared, past, study, start)
        _log.info("%s: finished after %.1f s", path, summary["wall_seconds"])
        observer.finished(summary)
    team.wait_for_all()
    return slots


def _finish(
    folder: RunDir | None,
    prepared: Prepared,
    past: Past,
    study: FolderStudy | None,
    start: float,
) -> dict[str, Any]:
    """Judge the best agent on the ranks that have the finalists; return the summary on all."""
    cohort, summary = prepared.cohort, None
    candidates = finalists(cohort, past.rounds)
    if cohort.here(candidates[0].slot):
        judged = _judged(folder, prepared, past.rounds, candidates, study, start)
        summary = {**judged, "earlier": past.earlier}
    if folder is not None and summary is not None:
        write_csv(folder.rounds(), folder.path, summary)
        folder.write_summary(summary)
    summary = cohort.team.first(summary)
    assert summary is not None, "the first rank has the finalists"
    return summary


def _writer(
    config: RunConfig, path: Path, folder: RunDir | None, prepared: Prepared
) -> tuple[RunWriter, FolderStudy | None]:
    """Return the writer of rounds and the study in the folder; called once all is restored."""
    shared = sees_folder(path, prepared.cohort.team)
    if folder is None:
        return RankWriter(path, shared=shared, idle=prepared.cohort.together), None
    # Only now: what is dropped may be all there is where what was recorded cannot be restored.
    folder.drop_unfinished()
    study = None
    if config.record.optuna and not is_url(config.record.storage):
        id = read_inputs_of(folder.path).id
        study = FolderStudy(folder, config, id, prepared.cohort.hp_config)
    writer = FolderWriter(
        folder,
        study,
        keep=config.record.checkpoints,
        keep_best=_keeps_best(config),
    )
    if folder.rounds():
        writer.follow_up(folder.rounds())  # whole, as Optuna gets them
    return writer, study


@dataclass(frozen=True)
class Past:
    """What a run folder holds of a run that goes on, read on the first rank.

    Attributes:
        rounds: The finished rounds, whole; those that are played now are appended.
        earlier: The ends that the run had before it was given more rounds.
        steered: How many requests the last round has recorded; those after them are new.
    """

    rounds: list[RoundRecord]
    earlier: list[dict[str, Any]]
    steered: int


def _past(config: RunConfig, folder: RunDir, prepared: Prepared, *, steers: bool) -> Past:
    """Read the recorded rounds of a run; add the requests made since to the last one."""
    with reading(folder.path):
        record_inputs(folder, config)
        rounds = folder.rounds()
        if rounds and _keeps_best(config):
            keep_best_of(folder, rounds)
        past = Past(rounds, folder.earlier_ends(), len(rounds[-1].steering) if rounds else 0)
    if steers and rounds and _goes_on(prepared, rounds):
        rounds[-1] = resumed(folder, rounds, prepared.cohort.hp_config)
    return past


def _keeps_best(config: RunConfig) -> bool:
    return config.record.keeps_best_apart(archive=config.evolve.archive)


def _judged(
    folder: RunDir | None,
    prepared: Prepared,
    rounds: Sequence[RoundRecord],
    candidates: Sequence[Finalist],
    study: FolderStudy | None,
    start: float,
) -> dict[str, Any]:
    """Choose among the finalists, and judge the best; returns what summary.json holds."""
    choice = choose(prepared, candidates)
    best, files = choice.best, dict[str, str]()
    if best.kind == "mean":
        snapshot = snapshot_agent(prepared.cohort, best.slot)
        if folder is not None:
            with writing(folder.path / MEAN):
                files = snapshot.write(folder.path / MEAN)
                sync_into(folder.path, folder.path / MEAN)
        if study is not None:
            study.record_mean(best.member, rounds[-1], choice.scores[candidates.index(best)])
    summary = judge(prepared, rounds, best, time.perf_counter() - start)
    summary["candidates"] = candidates_summary(candidates, choice)
    summary["final_tokens"] = choice.tokens
    rules = dict(prepared.round_settings.population.stop)
    summary["stopped"] = {name: rules.get(name) for name in rounds[-1].stopped}
    summary["files"] = {f"{MEAN}/{name}": digest for name, digest in files.items()}
    return summary


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
    """Play the rounds that are left, or as many as a rule or a person allows.

    `rounds` are the rounds so far; each new round is appended. With `outlines`, for a run in a
    folder, each round in `rounds` is reduced to its outline once the next one has been played.

    Returns:
        The slots of the agents that are left.
    """
    while _goes_on(prepared, rounds):
        record = play_round(
            prepared.cohort,
            prepared.env,
            prepared.round_settings,
            slots,
            len(rounds),
            writer=writer,
            observer=observer,
            limit=limit,
            past=rounds,
            steering=steering,
        )
        if outlines:
            rounds[-1:] = map(outline, rounds[-1:])
        rounds.append(record)
        slots = next_slots(record)
        if ends_by_request(record):
            break
    return slots


def _goes_on(prepared: Prepared, rounds: Sequence[RoundRecord]) -> bool:
    ended = bool(rounds) and rounds[-1].is_end
    return len(rounds) < prepared.round_settings.population.rounds and not ended


def as_config(config: RunConfig | str | Path | Mapping[str, Any]) -> RunConfig:
    """Return the settings of a run, from a YAML file or a mapping too.

    Raises:
        ConfigError: They are no such thing, or a setting is wrong.
    """
    if isinstance(config, RunConfig):
        return config
    if isinstance(config, str | Path):
        return configuration.load(config)
    if isinstance(config, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are untyped
        return configuration.from_dict(config)
    raise ConfigError(
        f"config: expected a RunConfig, the path of a YAML file or a mapping, got {shown(config)}"
    )
