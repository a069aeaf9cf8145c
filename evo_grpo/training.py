"""run(config) and resume(folder): from a YAML file to a leaderboard. Read this file first.

prepare     assemble.py: the shared base, N agents, the environment, the settings of a round
play_round  round.py: train, evaluate, checkpoint, select, mutate, record, apply
judge       judge.py: the best of the run, compared with the base on the test split, once
"""

from __future__ import annotations

import logging
import shutil
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evo_grpo import settings as configuration
from evo_grpo.assemble import Prepared, check_found, check_ranks, prepare, with_shards
from evo_grpo.checkpoints.write import snapshot_agent
from evo_grpo.envs.registry import build_task, is_multi_turn
from evo_grpo.envs.task import Task
from evo_grpo.errors import ConfigError, EvoGrpoError, RunDirError
from evo_grpo.extending import check_rounds, with_plan
from evo_grpo.inputs import (
    begun_extension,
    compare_inputs,
    record_changes,
    record_inputs,
    was_the_end,
)
from evo_grpo.judge import Finalist, candidates_summary, choose, finalists, judge
from evo_grpo.record.files import writing
from evo_grpo.record.folder import clear_run, read_rounds, refuse_objects, refuse_taken
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.names import BASELINE, BEST, CONFIG, MEAN
from evo_grpo.record.observer import Observer, check_observer
from evo_grpo.record.records import RoundRecord, outline
from evo_grpo.record.run_dir import RunDir
from evo_grpo.record.summary import read_summary
from evo_grpo.report.notebook import RunFolder
from evo_grpo.restoring import restore
from evo_grpo.round import RunWriter, next_slots, play_round
from evo_grpo.run_writer import FolderWriter, RankWriter, keep_best_of, sees_folder
from evo_grpo.settings import RunConfig
from evo_grpo.settings.trackers import check_trackers
from evo_grpo.steering import RunSteering
from evo_grpo.steps import Limit
from evo_grpo.studies import check_storage, deliver_rest, keeping_trials
from evo_grpo.team.ranks import find_team
from evo_grpo.team.team import Team
from evo_grpo.trackers.following import with_trackers
from evo_grpo.types import Slot
from evo_grpo.validation import shown

if TYPE_CHECKING:
    from evo_grpo.terminal.progress import RunProgress

_log = logging.getLogger(__name__)


def run(
    config: RunConfig | str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    force: bool = False,
    observer: Observer | None = None,
    progress: bool | None = None,
) -> Path:
    """Train and evolve a population from its first round to its last.

    What `evo-grpo steer` asks of its folder meanwhile is carried out between two rounds; after
    `stop-after-round` it returns before the end, with a folder to be resumed and no summary.

    Args:
        config: What to run: a `RunConfig`, the path of a YAML file, or a mapping as in such a file.
        out: Run folder; None makes a fresh `runs/<name>-<n>`.
        force: Replace a run that is already there.
        observer: Follows the progress.
        progress: Show progress and the result; None does in a terminal and in a notebook where no
            observer follows, True also in a pipe or a file, False nowhere.

    Returns:
        The run folder.

    Raises:
        EvoGrpoError: Any subclass; bad input is found before the first round where it can be.
    """
    config = _as_config(config)
    if _is_shown(progress, observer):
        with _shown(progress, observer, config.model.name) as follower:
            path = run(config, out=out, force=force, observer=follower, progress=False)
            follower.show_ending(read_rounds(path), read_summary(path))
        return path
    observer = observer or Observer()
    check_observer(observer)
    team = find_team()
    config = with_shards(config, team)
    if out is not None and not force:
        team.lead(lambda: refuse_taken(Path(out)))
    team.lead(lambda: check_storage(config))
    check_trackers(config.record.trackers)
    tasks: list[Task | None] = []

    def build() -> None:
        check_found(config)
        several = is_multi_turn(config.env.kind)
        tasks.append(None if several else build_task(config.env, config.seed))

    team.gather(build)  # before there is a folder: each rank finds its own code and data, or not
    text = configuration.to_yaml(config)
    with ExitStack() as stack:
        folder: RunDir | None = None
        fresh = out is None or not Path(out).exists()

        def create() -> Path:
            nonlocal folder
            where = None if out is None else Path(out)
            folder = stack.enter_context(RunDir.create(where, config.name, text, force=force))
            return folder.path

        try:
            path = team.lead(create)
            prepared = stack.enter_context(_prepared(config, tasks[0], team))
        except (EvoGrpoError, KeyboardInterrupt):
            # If set-up fails, remove the folder so that a retry can use it.
            if folder is not None:
                clear_run(folder.path)
                if fresh:
                    shutil.rmtree(folder.path)
            raise
        observer = stack.enter_context(with_trackers(config.record, observer, rank=team.rank))
        play_and_judge(config, path, folder, prepared, observer)
    return RunFolder(path)


def _is_shown(progress: bool | None, observer: Observer | None) -> bool:
    return progress is True or (progress is None and observer is None)


@contextmanager
def _shown(progress: bool | None, observer: Observer | None, loaded: str) -> Generator[RunProgress]:
    """Show a run as the command line does; its first line before anything is loaded."""
    from evo_grpo.terminal import progress as screen  # rich, which a quiet call does without

    if observer is not None:
        check_observer(observer)
    with screen.progress(anywhere=progress is True, also=observer) as follower:
        follower.loading(loaded)
        yield follower


def _prepared(config: RunConfig, task: Task | None, team: Team) -> Prepared:
    """Prepare a run on all ranks; where one of them cannot, none goes on."""
    found: list[Prepared] = []
    team.gather(lambda: found.append(prepare(config, task, team)))
    return found[0]


def resume(
    folder: str | Path,
    *,
    rounds: int | None = None,
    allow: Sequence[str] = (),
    observer: Observer | None = None,
    progress: bool | None = None,
) -> Path:
    """Go on with a stopped run after its last whole round; a finished run is left as it is.

    An agent's adapter, reference, AdamW moments, hyperparameters and step counts come from its last
    checkpoint; its member and history from rounds.jsonl. The last round's recorded selection and
    mutation are then applied. No generator state is stored: random streams follow from the seed.

    Args:
        folder: The run folder.
        rounds: Rounds of the whole run, in place of population.rounds; a finished run goes on with
            it, as if it had had so many from the start. Its end so far is kept in the summary.
        allow: Files of yours that may have changed since the run began, by the names that the error
            gives which a change raises without this, such as "env.reward: my_rewards:score".
        observer: Follows the progress.
        progress: As for `run`.

    Returns:
        The run folder.

    Raises:
        RunDirError: `Population.train` recorded it with objects that no file can name.
        ConfigError: What the run is made of has changed, or `rounds` are fewer than were played.
        CheckpointError: A file of the run is missing or was changed.
    """
    if _is_shown(progress, observer):
        with _shown(progress, observer, str(folder)) as follower:
            path = resume(folder, rounds=rounds, allow=allow, observer=follower, progress=False)
            follower.show_ending(read_rounds(path), read_summary(path))
        return path
    observer = observer or Observer()
    check_observer(observer)
    team = find_team()
    with ExitStack() as stack:
        opened: RunDir | None = None

        def begin() -> RunConfig | None:
            nonlocal opened
            opened = stack.enter_context(RunDir.open(Path(folder)))
            return _go_on(opened, rounds, allow, team)

        config = team.lead(begin)
        if config is None:
            if opened is not None and (summary := opened.summary()) is not None:
                observer.finished(summary)
                deliver_rest(opened)
            return RunFolder(folder)
        check_trackers(config.record.trackers)
        prepared = stack.enter_context(_prepared(config, None, team))
        observer = stack.enter_context(with_trackers(config.record, observer, rank=team.rank))
        play_and_judge(config, Path(folder), opened, prepared, observer)
    return RunFolder(folder)


def _go_on(
    opened: RunDir, rounds: int | None, allow: Sequence[str], team: Team
) -> RunConfig | None:
    """Return the settings with which a run goes on, recorded in its folder; None if it is over."""
    summary, begun = opened.summary(), begun_extension(opened)
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
    # First what is to come: stopped in between, a resume goes on with it.
    record_changes(opened, changed)
    if wanted is not None:
        opened.write_config(configuration.to_yaml(config))
    if was_the_end(opened):
        opened.reopen(with_plan(config, played))
    return config


def _recorded_config(opened: RunDir) -> RunConfig:
    """Return the settings of a run folder, where a resume can follow them."""
    refuse_objects(
        opened.path,
        "so it cannot be resumed from here; in Python, make the population again, or load its "
        "agents from checkpoints/ with load_checkpoint, and call train",
    )
    if opened.config_text().startswith(BASELINE):
        above = opened.path.parent.parent
        raise RunDirError(
            f"{opened.path}: it is part of the comparison of {above} and ends by tokens, not "
            f"by rounds; go on with: evo-grpo resume {above} --compare"
        )
    return configuration.load(opened.path / CONFIG)


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

    Args:
        config: What the folder records.
        path: The run folder.
        folder: It, open, on the first rank; None on the others.
        prepared: The run as it was before its first round.
        observer: Follows the progress.
        limit: Ends the training of a round before all its steps; None plays all.

    Returns:
        The slots of the agents that are left.
    """
    start, team = time.perf_counter(), prepared.cohort.team
    rounds, earlier = team.lead(lambda: _played(config, folder))
    slots = prepared.slots
    steering = None
    if limit is None:  # a population that is compared trains by itself
        steering = RunSteering(path, folder, prepared.cohort.hp_config, team, observer)
    if rounds:
        if steering is not None and _goes_on(prepared, rounds):
            rounds[-1] = steering.resumed(rounds)
        slots = restore(prepared, rounds, path)
        rounds[:-1] = map(outline, rounds[:-1])
    writer, lineage = _writer(config, path, folder, prepared)
    total = prepared.round_settings.rounds
    how = "resumed" if rounds else "started"
    _log.info("%s: %s at round %d of %d", path, how, len(rounds) + 1, total)
    observer.started(path, total, len(rounds), config)
    with writer:
        if steering is not None:
            steering.begin(rounds, writer.amend)
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
    if steering is not None and steering.stopping:
        return slots
    observer.stage(len(rounds) - 1, "test", 0, 1)
    candidates = finalists(prepared.cohort, rounds)

    def end() -> dict[str, Any]:
        summary = _judged(config, folder, prepared, rounds, candidates, lineage, start)
        if folder is not None:
            folder.write_summary({**summary, "earlier": earlier})
        return {**summary, "earlier": earlier}

    summary = prepared.cohort.on_first(end)
    _log.info("%s: finished after %.1f s", path, summary["wall_seconds"])
    observer.finished(summary)
    return slots


def _writer(
    config: RunConfig, path: Path, folder: RunDir | None, prepared: Prepared
) -> tuple[FolderWriter | RankWriter, Lineage | None]:
    """Return what writes rounds, and the study in the folder; called once all is restored."""
    team, shared = prepared.cohort.team, sees_folder(path, prepared.cohort.team)
    if folder is None:
        return RankWriter(path, team, shared=shared, idle=prepared.cohort.together), None
    # Only now: what is dropped may be all there is where what was recorded cannot be restored.
    folder.drop_unfinished()
    lineage, delivery = folder.keep(keeping_trials(folder, config, prepared.cohort.hp_config))
    writer = FolderWriter(
        folder,
        lineage,
        keep=config.record.checkpoints,
        keep_best=_keeps_best(config),
        team=team,
        delivery=delivery,
    )
    if folder.rounds():
        writer.follow_up(folder.rounds())  # whole, as Optuna gets them
    return writer, lineage


def _played(
    config: RunConfig, folder: RunDir | None
) -> tuple[list[RoundRecord], list[dict[str, Any]]]:
    """Return the rounds of a folder, and its earlier ends; whole, so that a run may go on."""
    assert folder is not None, "the first rank has the folder"
    record_inputs(folder, config)
    rounds = folder.rounds()
    if rounds and _keeps_best(config):
        keep_best_of(folder, rounds)
    return rounds, folder.earlier_ends()


def _keeps_best(config: RunConfig) -> bool:
    return config.record.keeps_best_apart(archive=config.evolve.archive)


def _judged(
    config: RunConfig,
    folder: RunDir | None,
    prepared: Prepared,
    rounds: Sequence[RoundRecord],
    candidates: Sequence[Finalist],
    lineage: Lineage | None,
    start: float,
) -> dict[str, Any]:
    """Choose among the finalists, and judge the best; returns what summary.json holds."""
    choice = choose(config.evolve.fitness, prepared, candidates)
    best, files = choice.best, dict[str, str]()
    if best.kind == "mean":
        snapshot = snapshot_agent(prepared.cohort, best.slot)
        if folder is not None:
            with writing(folder.path / MEAN):
                files = snapshot.write(folder.path / MEAN)
        if lineage is not None:
            lineage.record_mean(best.member, rounds[-1], choice.scores[candidates.index(best)])
        best = replace(best, checkpoint=MEAN)
    elif best.kind == "archive":
        best = replace(best, checkpoint=BEST)
    seconds = time.perf_counter() - start
    summary = judge(config.evolve.fitness, prepared, rounds, best, seconds)
    summary["candidates"] = candidates_summary(candidates, choice)
    summary["final_tokens"] = choice.tokens
    rules = dict(config.population.stop)
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
    steering: RunSteering | None = None,
    outlines: bool = False,
) -> tuple[Slot, ...]:
    """Play the rounds that are left, or as many as a rule or a person allows.

    Args:
        prepared: Agents, environment and how rounds are played.
        slots: The agents that play the next round.
        rounds: The rounds that were played; those played now are appended.
        writer: Where rounds are written.
        observer: Follows the progress.
        limit: Ends the training of a round before all its steps; None plays all.
        steering: What a person asks for between two rounds; None where nobody can.
        outlines: Keep the outlines of rounds alone once the next one is played; for rounds that a
            folder has whole.

    Returns:
        The slots of the agents that are left.
    """
    while _goes_on(prepared, rounds) and not (steering is not None and steering.stopping):
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
    return slots


def _goes_on(prepared: Prepared, rounds: Sequence[RoundRecord]) -> bool:
    """Return whether a round is left to be played."""
    ended = bool(rounds) and rounds[-1].is_end
    return len(rounds) < prepared.round_settings.rounds and not ended


def _as_config(config: RunConfig | str | Path | Mapping[str, Any]) -> RunConfig:
    if isinstance(config, RunConfig):
        return config
    if isinstance(config, str | Path):
        return configuration.load(config)
    if isinstance(config, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are untyped
        return configuration.from_dict(config)
    raise ConfigError(
        f"config: expected a RunConfig, the path of a YAML file or a mapping, got {shown(config)}"
    )
