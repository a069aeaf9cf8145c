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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from evo_grpo import settings as configuration
from evo_grpo.assemble import Prepared, check_found, check_ranks, prepare, with_shards
from evo_grpo.checkpoints.manifest import read_attributes
from evo_grpo.checkpoints.read import load_agent
from evo_grpo.checkpoints.write import save_agent
from evo_grpo.cohort.cohort import Cohort
from evo_grpo.envs.registry import build_task, is_multi_turn
from evo_grpo.envs.task import Task
from evo_grpo.errors import CheckpointError, ConfigError, EvoGrpoError, RunDirError
from evo_grpo.evolve.generation import Generation
from evo_grpo.extending import check_rounds, history_of, members_of, with_plan
from evo_grpo.inputs import (
    begun_extension,
    compare_inputs,
    record_changes,
    record_inputs,
    was_the_end,
)
from evo_grpo.judge import Finalist, candidates_summary, choose, finalists, judge
from evo_grpo.model.digest import base_digest, comparable_digests
from evo_grpo.record.digests import check_digests
from evo_grpo.record.family import best_ever, next_member_id
from evo_grpo.record.files import writing
from evo_grpo.record.folder import clear_run, refuse_objects, refuse_taken
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.names import BEST, CONFIG, MEAN
from evo_grpo.record.observer import Observer, check_observer
from evo_grpo.record.plain import inside
from evo_grpo.record.records import AgentRecord, RoundRecord, outline
from evo_grpo.record.run_dir import RunDir
from evo_grpo.round import RunWriter, apply, next_slots, play_round, recorded_parents
from evo_grpo.run_writer import FolderWriter, RankWriter, keep_best_of, sees_folder
from evo_grpo.schema.hparams import Hparams
from evo_grpo.settings import RunConfig
from evo_grpo.steps import Limit
from evo_grpo.studies import check_storage, deliver_rest, keeping_trials
from evo_grpo.team.ranks import find_team
from evo_grpo.team.team import Team
from evo_grpo.types import Score, Slot
from evo_grpo.validation import shown

_log = logging.getLogger(__name__)

#: How population.yaml begins in a folder of a comparison: training ends by a number of tokens.
BASELINE = "# Without evolution, beside the run two folders above it; training tokens: "


def run(
    config: RunConfig | str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    force: bool = False,
    observer: Observer | None = None,
) -> Path:
    """Train and evolve a population from its first round to its last.

    Args:
        config: What to run: a `RunConfig`, the path of a YAML file, or a mapping as in such a file.
        out: Run folder; None makes a fresh `runs/<name>-<n>`.
        force: Replace a run that is already there.
        observer: Follows the progress.

    Returns:
        The run folder.

    Raises:
        EvoGrpoError: Any subclass; bad input is found before the first round where it can be.
    """
    config = _as_config(config)
    observer = observer or Observer()
    check_observer(observer)
    team = find_team()
    config = with_shards(config, team)
    if out is not None and not force:
        team.lead(lambda: refuse_taken(Path(out)))
    team.lead(lambda: check_storage(config))
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
        play_and_judge(config, path, folder, prepared, observer)
    return path


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

    Returns:
        The run folder.

    Raises:
        RunDirError: `Population.train` recorded it with objects that no file can name.
        ConfigError: What the run is made of has changed, or `rounds` are fewer than were played.
        CheckpointError: A file of the run is missing or was changed.
    """
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
            return Path(folder)
        prepared = stack.enter_context(_prepared(config, None, team))
        play_and_judge(config, Path(folder), opened, prepared, observer)
    return Path(folder)


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
    if rounds:
        slots = restore(prepared, rounds, path)
        rounds[:-1] = map(outline, rounds[:-1])
    shared = sees_folder(path, team)
    lineage: Lineage | None = None
    writer: FolderWriter | RankWriter = RankWriter(path, team, shared=shared)
    if folder is not None:
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
        if rounds:
            writer.follow_up(folder.rounds())  # whole, as Optuna gets them
    total = prepared.round_settings.rounds
    how = "resumed" if rounds else "started"
    _log.info("%s: %s at round %d of %d", path, how, len(rounds), total)
    observer.started(path, total, len(rounds), config)
    with writer:
        slots = play_rounds(
            prepared, slots, rounds, writer=writer, observer=observer, limit=limit, outlines=True
        )
    observer.stage(total - 1, "test", 0, 1)
    candidates = finalists(prepared.cohort, rounds)

    def end() -> dict[str, Any]:
        assert folder is not None, "the first rank has the folder"
        summary = _judged(config, folder, prepared, rounds, candidates, lineage, start)
        folder.write_summary({**summary, "earlier": earlier})
        return {**summary, "earlier": earlier}

    summary = team.lead(end)
    _log.info("%s: finished after %.1f s", path, summary["wall_seconds"])
    observer.finished(summary)
    return slots


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
    folder: RunDir,
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
        with writing(folder.path / MEAN):
            files = save_agent(prepared.cohort, best.slot, folder.path / MEAN)
        if lineage is not None:
            lineage.record_mean(best.member, rounds[-1], choice.scores[candidates.index(best)])
        best = replace(best, checkpoint=MEAN)
    elif best.kind == "archive":
        best = replace(best, checkpoint=BEST)
    seconds = time.perf_counter() - start
    summary = judge(config.evolve.fitness, prepared, rounds, best, seconds)
    summary["candidates"] = candidates_summary(candidates, choice)
    summary["final_tokens"] = choice.tokens
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
    outlines: bool = False,
) -> tuple[Slot, ...]:
    """Play the rounds that are left.

    Args:
        prepared: Agents, environment and how rounds are played.
        slots: The agents that play the next round.
        rounds: The rounds that were played; those played now are appended.
        writer: Where rounds are written.
        observer: Follows the progress.
        limit: Ends the training of a round before all its steps; None plays all.
        outlines: Keep the outlines of rounds alone once the next one is played; for rounds that a
            folder has whole.

    Returns:
        The slots of the agents that are left.
    """
    for number in range(len(rounds), prepared.round_settings.rounds):
        record = play_round(
            prepared.cohort,
            prepared.env,
            prepared.round_settings,
            slots,
            number,
            writer=writer,
            observer=observer,
            limit=limit,
            past=rounds,
        )
        if outlines:
            rounds[-1:] = map(outline, rounds[-1:])
        rounds.append(record)
        slots = next_slots(record)
    return slots


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


Restored = tuple[Hparams, list[Score], int, int]
"""Of an agent: hyperparameters, history, steps, and updates of its reference."""


def restore(prepared: Prepared, rounds: Sequence[RoundRecord], folder: Path) -> tuple[Slot, ...]:
    """Bring a cohort to where it stood after the last whole round: load, then evolve as recorded.

    Args:
        prepared: The run as it was before its first round.
        rounds: The finished rounds, first to last; at least one.
        folder: The run folder.

    Returns:
        The slots of the agents that play the next round.

    Raises:
        CheckpointError: The population had another size, or a checkpoint of the last round is
            missing or was changed since.
    """
    first, last, cohort = rounds[0], rounds[-1], prepared.cohort
    if len(first.agents) != len(prepared.slots):
        raise CheckpointError(
            f"run {folder}: population.yaml asks for {len(prepared.slots)} agents, but its rounds "
            f"were played by {len(first.agents)}; put population.size back"
        )
    slots = tuple(record.agent for record in last.agents)
    # Where a rank does not see the checkpoints, the first one loads and sends them.
    apart = not sees_folder(folder, cohort.team)
    cohort.place(slots, weights=False)
    home = {slot: cohort.agents[slot].rank for slot in slots}
    if apart:
        cohort.move(dict.fromkeys(slots, 0), weights=False)
    for slot in sorted(set(prepared.slots) - set(slots)):
        cohort.remove(slot)
    members = members_of(rounds)
    for record in last.agents:
        _restore_agent(cohort, record, last, folder)
        # A new member begins without a history, so the member comes first.
        cohort.set_member(record.agent, members[record.member])
        state = cohort.agents[record.agent]
        state.history = history_of(rounds, record.member)
        state.dead_steps = int(record.metrics.get("dead_steps", 0))
    archive = None
    best = best_ever(rounds) if prepared.round_settings.archive else None
    if best is not None and best.score is not None:
        archive = cohort.add_spare(members[best.member], best.hparams)
        _restore_agent(cohort, replace(best, agent=archive.slot), rounds[best.round], folder, BEST)
        archive.history = [best.score]
        cohort.archive = archive
    if apart:
        cohort.move(home)
    previous = [cohort.agents[slot].member for slot in slots]
    parents = recorded_parents(last, previous, None if archive is None else archive.slot)
    generation = Generation(last.members, last.next_hparams, parents, cohort.next_member)
    inherit = prepared.round_settings.inherit_optimizer
    apply(cohort, slots, generation, inherit_optimizer=inherit)
    cohort.reserve_members(next_member_id(rounds))
    return generation.slots


def _restore_agent(
    cohort: Cohort,
    record: AgentRecord,
    played: RoundRecord,
    folder: Path,
    copy: str | None = None,
) -> None:
    """Load the checkpoint of an agent as a round recorded it, or a copy of it."""
    if record.checkpoint is None:
        raise CheckpointError(
            f"run {folder}: round {record.round} has no checkpoint of agent {record.agent}"
        )
    name, state = record.checkpoint, cohort.agents[record.agent]

    def load() -> Restored | None:
        if not cohort.here(state.slot):
            return None
        place = inside(folder, copy or name)
        who = f"round {record.round} recorded for agent {record.agent}"
        check_digests(place, played.files_of(name), who)
        saved = str(read_attributes(place)["base_digest"])
        live = base_digest(cohort.base)
        if comparable_digests(saved, live) and saved != live:
            raise CheckpointError(
                f"checkpoint {place}: it was trained over base {cohort.base.name!r} with other "
                "weights than it has now; put the base back as it was"
            )
        load_agent(cohort, record.agent, place, load_optimizer=True)
        return state.hparams, state.history, state.steps, state.reference_updates

    # The ranks that do not have its weights know all else about it.
    told = cohort.team.gather(load)[state.rank]
    assert told is not None, "the rank that has it has loaded it"
    state.hparams, state.history, state.steps, state.reference_updates = told
