"""Defines run(config) and resume(folder), which train a population. Read this file first.

prepare     assemble.py: the shared base, N agents, the environment, the settings of a round
play_round  population/round.py: train, evaluate, checkpoint, select, mutate, record, apply
judge       judge.py: compare the best agent of the run with the base, once, on the test split
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
from evo_grpo.errors import EvoGrpoError, RunDirError
from evo_grpo.places import expanded
from evo_grpo.population.checkpoints.write import snapshot_agent
from evo_grpo.population.plan import ends_by_request
from evo_grpo.population.ranks.ranks import find_team, sharing_early_errors
from evo_grpo.population.ranks.team import Team
from evo_grpo.population.round import Steerer, next_slots, play_round
from evo_grpo.population.rules import RoundSettings
from evo_grpo.population.steps import Limit, RunWriter
from evo_grpo.record.config import read_config
from evo_grpo.record.earlier import with_start
from evo_grpo.record.files import many_objects, reading, sync_into, to_line, writing
from evo_grpo.record.folder import (
    config_text,
    listed_objects,
    refuse_objects,
    with_objects,
)
from evo_grpo.record.leaderboard import write_csv
from evo_grpo.record.names import BASELINE, CONFIG, MEAN, SUMMARY
from evo_grpo.record.observer import Observer, ObserverList, check_observer
from evo_grpo.record.records import RoundRecord, outline
from evo_grpo.record.run_dir import RunDir, clear_run, refuse_taken
from evo_grpo.record.study import check_storage, study_is_written, write_study
from evo_grpo.record.summary import earlier_ends, read_summary
from evo_grpo.settings import RunConfig
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS, DEFAULT_PROMPTS
from evo_grpo.settings.trackers import check_trackers
from evo_grpo.settings.yaml import as_config
from evo_grpo.training.assemble import (
    Prepared,
    check_found,
    check_ranks,
    prepare,
    task_of,
    with_limits,
    with_revisions,
    with_shards,
)
from evo_grpo.training.environments import record_rewards, spent_on_rewards
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
from evo_grpo.training.shortages import warn_of_shortages
from evo_grpo.training.steering import RunSteering, resumed
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
    """Train and evolve a population from its first round to its last; see `evo_grpo.run`.

    With `report`, a reader keeps an HTML report of the run up to date while it trains.
    """
    with sharing_early_errors():
        config = as_config(config)
    observer = observer or Observer()
    check_observer(observer)
    team = find_team()
    where = None if out is None else expanded(out)
    with Followers(report=report) as followers, ExitStack() as stack, team.sharing_errors():
        check_same_run(team, "run", {}, config)
        config = with_shards(config, team)
        if team.rank == 0:
            check_place(where, config, force=force)
        check_trackers(config.record.trackers)
        check_found(config)
        config = with_revisions(config, team)
        if isinstance(config.population.init, Mapping):  # the first rank alone may have those runs
            init = team.first(with_start(config).population.init if team.rank == 0 else None)
            config = config.replace(population=config.population.replace(init=init))
        task = task_of(config)
        longest = DEFAULT_OUTPUT_TOKENS if task is None else task.max_output_tokens
        config = with_limits(config, task, team).settled(longest)
        team.wait_for_all()  # every rank finds its code and data before the folder is created
        fresh, folder = where is None or not where.exists(), None
        if team.rank == 0:
            text = with_objects(configuration.to_yaml(config), config.env.objects())
            folder = stack.enter_context(RunDir.create(where, config.name, text, force=force))
            prompts = config.algorithm.prompts_per_step or DEFAULT_PROMPTS
            warn_of_shortages(task, prompts, config.evolve.fitness)
        with _removed_on_failure(folder, fresh=fresh):
            path = team.first(Path() if folder is None else folder.path)
            prepared = stack.enter_context(prepare(config, task, team))
        play_and_judge(config, path, folder, prepared, _watching(observer, followers, folder))
    return path


def check_place(where: Path | None, config: RunConfig, *, force: bool) -> None:
    """Refuse a folder or a storage that cannot record the run; called on the first rank."""
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
                changed = _continued_inputs(opened, rounds, allow, team)
        config = team.first(None if changed is None else changed.config)
        if config is None:
            if opened is not None and (summary := read_summary(opened.path)) is not None:
                observer.finished(summary)
                ended = read_config(Path(folder))
                if not study_is_written(opened.path):  # the process was killed before
                    _write_study(ended, opened.path, observer)
                # Readers may not have read the end of the run, or any of it.
                followers.started(Path(folder), summary["rounds"], 0, ended)
            return Path(folder)
        check_trackers(config.record.trackers)
        check_same_files(team, config)
        team.wait_for_all()  # all ranks pass their checks before anything is recorded
        if opened is not None and changed is not None:
            record_changed(opened, changed)
        prepared = stack.enter_context(prepare(config, None, team))
        watching = _watching(observer, followers, opened)
        play_and_judge(config, Path(folder), opened, prepared, watching)
    return Path(folder)


def _write_study(config: RunConfig, place: Path, observer: Observer) -> None:
    """Write the study of a run that has ended, unless the run's reader does."""
    if not config.record.optuna or config.record.readers:
        return
    try:
        write_study(place, read_inputs_of(place).id)
    except EvoGrpoError as error:  # nothing of the run is lost
        _log.warning("%s", error)
        observer.note(str(error))


def _watching(observer: Observer, followers: Followers, folder: RunDir | None) -> Observer:
    """Return the observer of a run; on the rank that has the folder, it includes the followers."""
    return observer if folder is None else ObserverList((observer, followers))


def _continued_inputs(
    opened: RunDir, rounds: int | None, allow: Sequence[str], team: Team
) -> Changed | None:
    """Return the inputs that a run continues with, None if it is finished; record nothing."""
    if is_finished(opened, rounds):
        return None
    return changed_inputs(opened, _recorded_config(opened), rounds, allow, team)


def is_finished(opened: RunDir, rounds: int | None) -> bool:
    """Return whether a run is finished and `rounds` does not extend it."""
    summary = read_summary(opened.path)
    if summary is None or begun_extension(opened) is not None:
        return False
    return rounds in (None, summary["rounds"])


def changed_inputs(
    opened: RunDir,
    config: RunConfig,
    rounds: int | None,
    allow: Sequence[str],
    team: Team,
    objects: Mapping[str, str] | None = None,
) -> Changed:
    """Return the inputs that an unfinished run continues with; record nothing.

    `objects` are the parts of the Python objects that the run is given.
    """
    played, begun = opened.rounds(), begun_extension(opened)
    check_ranks(config, team)
    if not played:
        check_storage(config)
    if rounds is not None:
        check_rounds(rounds, len(played), begun or config.population.rounds)
    wanted = begun if rounds is None else rounds
    if wanted is not None:
        config = config.replace(population=config.population.replace(rounds=wanted))
    changed = compare_inputs(opened, config, rounds=wanted, allow=allow, objects=objects)
    for note in changed.notes:
        warnings.warn(note, UserWarning, stacklevel=2)
    return changed


def record_changed(opened: RunDir, changed: Changed, settings: RoundSettings | None = None) -> None:
    """Record the inputs that a run continues with; `settings` are those of its rounds, if known."""
    # Record the inputs first: if the process stops after this call, a resume continues with them.
    record_changes(opened, changed)
    if changed.extended:
        text = with_objects(configuration.to_yaml(changed.config), listed_objects(opened.path))
        opened.write(CONFIG, text)
    if was_the_end(opened):
        opened.reopen(with_plan(changed.config, opened.rounds(), settings))


def _recorded_config(opened: RunDir) -> RunConfig:
    """Return the settings of a run folder; refuse a folder that cannot be resumed."""
    refuse_objects(
        opened.path,
        "so no command can make them; continue it in Python, with env and the other objects as at "
        f"the begin of the run: evo_grpo.Population.resume({str(opened.path)!r}, env=...)",
    )
    refuse_part_of_comparison(opened.path)
    return read_config(opened.path)


def refuse_part_of_comparison(folder: Path) -> None:
    """Refuse a population of a comparison, which only the comparison continues."""
    if config_text(folder).startswith(BASELINE):
        above = folder.parent.parent
        raise RunDirError(
            f"{folder}: it is part of the comparison of {above} and ends by tokens, not "
            f"by rounds; continue with: evo-grpo resume {above} --compare"
        )


def play_and_judge(
    config: RunConfig,
    path: Path,
    folder: RunDir | None,
    prepared: Prepared,
    observer: Observer,
    *,
    limit: Limit | None = None,
) -> tuple[Slot, ...]:
    """Play the missing rounds of a run, compare the best agent with the base, write the summary.

    The first rank has the folder open; on the other ranks `folder` is None. `limit` may end the
    training of a round before its last step.

    Returns:
        The slots of the remaining agents.
    """
    start, team = time.perf_counter(), prepared.cohort.team
    # The user's code runs from this point on and may change the working directory.
    place = path.absolute()
    if folder is not None:
        folder.path = place
    steers = limit is None  # a comparison, which has a limit, takes no requests
    past = team.first(None if folder is None else _past(config, folder, prepared, steers=steers))
    assert past is not None, "the first rank has the folder"
    rounds, slots = past.rounds, prepared.slots
    if rounds:
        with reading(place):
            slots = restore(prepared, rounds, place)
        with many_objects():
            rounds[:-1] = map(outline, rounds[:-1])
    writer = _writer(config, place, folder, prepared)
    team.wait_for_all()  # unfinished files are removed before any rank writes
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
    if not _is_unfinished(prepared, rounds):  # otherwise a request ended the process early
        observer.stage(len(rounds) - 1, "test", 0, 1)
        summary = _finish(folder, prepared, past, start)
        _log.info("%s: finished after %.1f s", path, summary["wall_seconds"])
        observer.finished(summary)
    if folder is not None:
        _write_study(config, place, observer)
    team.wait_for_all()  # no rank leaves while another one still reads its agents or files
    return slots


def _finish(
    folder: RunDir | None,
    prepared: Prepared,
    past: Past,
    start: float,
) -> dict[str, Any]:
    """Judge the best agent on the ranks that hold the finalists; every rank returns the summary."""
    cohort, summary = prepared.cohort, None
    candidates = finalists(cohort, past.rounds)
    if cohort.is_local(candidates[0].slot):
        judged = _judged(folder, prepared, past.rounds, candidates, start)
        summary = {**judged, "earlier": past.earlier}
    spent = spent_on_rewards(prepared.env, cohort.team, writes=folder is not None)
    if summary is not None and spent:
        summary["judge"] = spent
    if folder is not None and summary is not None:
        write_csv(folder.rounds(), folder.path, summary)
        folder.write(SUMMARY, to_line(summary, indent=2) + "\n")
    summary = cohort.team.first(summary)
    assert summary is not None, "the first rank has the finalists"
    return summary


def _writer(config: RunConfig, path: Path, folder: RunDir | None, prepared: Prepared) -> RunWriter:
    """Return the writer of rounds; called after the run is restored."""
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


@dataclass(frozen=True)
class Past:
    """The recorded past of a run, read on the first rank.

    Attributes:
        rounds: The whole records of the finished rounds; later rounds are appended.
        earlier: Summaries of the run from before it was extended by more rounds.
        steered: Number of requests that the last round has recorded; later requests are new.
    """

    rounds: list[RoundRecord]
    earlier: list[dict[str, Any]]
    steered: int


def _past(config: RunConfig, folder: RunDir, prepared: Prepared, *, steers: bool) -> Past:
    """Read the recorded rounds of a run; add the requests made since to the last one."""
    with reading(folder.path):
        record_inputs(folder, config, prepared.objects)
        rounds = folder.rounds()
        if rounds and _keeps_best(config):
            folder.keep_best()
        past = Past(rounds, earlier_ends(folder.path), len(rounds[-1].steering) if rounds else 0)
    if steers and rounds and _is_unfinished(prepared, rounds):
        rounds[-1] = resumed(folder, rounds, prepared.cohort.hp_config)
    return past


def _keeps_best(config: RunConfig) -> bool:
    return config.record.keeps_best_apart(archive=config.evolve.keeps_archive)


def _judged(
    folder: RunDir | None,
    prepared: Prepared,
    rounds: Sequence[RoundRecord],
    candidates: Sequence[Finalist],
    start: float,
) -> dict[str, Any]:
    """Choose the best finalist and judge it; return the content of summary.json."""
    choice = choose(prepared, candidates)
    best, files = choice.best, dict[str, str]()
    if best.kind == "mean":
        snapshot = snapshot_agent(prepared.cohort, best.slot)
        if folder is not None:
            with writing(folder.path / MEAN):
                files = snapshot.write(folder.path / MEAN)
                sync_into(folder.path, folder.path / MEAN)
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
    """Play the remaining rounds, until a rule or a request ends the run.

    `rounds` are the rounds so far; each new round is appended. With `outlines`, for a run in a
    folder, each round in `rounds` is reduced to its outline once the next one has been played.

    Returns:
        The slots of the remaining agents.
    """
    prepared.between_rounds(slots, len(rounds))
    while _is_unfinished(prepared, rounds):
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
        if outlines and rounds:
            rounds[-1] = outline(rounds[-1])
        rounds.append(record)
        slots = next_slots(record)
        prepared.between_rounds(slots, len(rounds))
        if ends_by_request(record):
            break
    return slots


def _is_unfinished(prepared: Prepared, rounds: Sequence[RoundRecord]) -> bool:
    ended = bool(rounds) and rounds[-1].is_end
    return len(rounds) < prepared.round_settings.population.rounds and not ended
