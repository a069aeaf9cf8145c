"""replay(run): train an agent with the winner's schedule, another with its last values; compare.

A schedule is worth something only where it beats the values with which it ended, at equal tokens.
So both are trained from scratch, each with the tokens of the winner's lineage and with those of the
whole run, and each several times: trainings with the same values differ by their draws. All agents
share one cohort, one batch per step and the order of the prompts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evo_grpo.envs.protocol import Environment
from evo_grpo.errors import CheckpointError
from evo_grpo.population.checkpoints.read import load_agent
from evo_grpo.population.checkpoints.write import save_agent
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.evaluate import evaluate
from evo_grpo.population.stats import Stopwatch, Tally
from evo_grpo.population.steps import starts_from, train_step
from evo_grpo.printable import printable
from evo_grpo.record.config import read_config
from evo_grpo.record.files import sync_into, writing
from evo_grpo.record.folder import clear_replay
from evo_grpo.record.names import REPLAY
from evo_grpo.record.observer import Observer, check_observer
from evo_grpo.record.replay import WINNER, Difference, Replay, Replayed, read_replay, write_replay
from evo_grpo.record.run_dir import RunDir
from evo_grpo.record.schedule import Schedule, Training, read_schedule, trainings
from evo_grpo.schema.validation import whole
from evo_grpo.seeding import derive
from evo_grpo.settings import RunConfig
from evo_grpo.training.assemble import add_agents, build_parts
from evo_grpo.training.inputs.differences import check_inputs
from evo_grpo.types import Member, Score, Slot

REPEATS = 3
"""Trainings of each kind. Of pairs with equal values a third passes for different by the test
prompts alone (docs/replay.md); compared three with three, 3% do."""

_log = logging.getLogger(__name__)


def replay(
    run: str | Path,
    *,
    repeats: int | None = None,
    force: bool = False,
    allow: Sequence[str] = (),
    observer: Observer | None = None,
) -> Replay:
    """Replay the schedule of a finished run's winner, and compare it with its last values.

    The trainings have the run's data, its test split and its order of prompts. All else is drawn
    from a seed of their own, which follows from that of the run: the first weights of the adapters,
    completions, the order of minibatches, dropout, and the draws on the test split. Nothing of the
    run folder changes but `replay/`, which gets replay.json and a checkpoint of the first training
    of each kind; they are written at the end, so an interrupted replay leaves an earlier one as it
    was.

    Args:
        run: The run folder.
        repeats: Trainings of each kind, >= 1; None takes 3, or what a finished replay has. With one
            alone nothing is claimed, for chance moves a training more than a test shows.
        force: Train again where a finished replay is there already; else that one is returned.
        allow: Files of yours that may be others than those of the run, by the names that the error
            gives which such a file raises without this.
        observer: Hears `started`, and `stage` for each step and for the test.

    Raises:
        RunNotFoundError: It is no run folder.
        RunDirError: The run is not finished, its winner trained for a single round, it was recorded
            with objects that no file can name, or another process uses it.
        ConfigError: The settings or the files of the run have changed.
        CheckpointError: The winner's checkpoint is missing or damaged, or a record is.
    """
    observer = observer or Observer()
    check_observer(observer)
    if repeats is not None:
        whole(1).check("repeats", repeats)
    schedule = read_schedule(run)
    with RunDir.open(run) as opened:
        folder = opened.path
        earlier = None if force else read_replay(folder)
        if earlier is not None and repeats in (None, earlier.repeats):
            return earlier
        if not (folder / schedule.checkpoint).is_dir():
            raise CheckpointError(
                f"{folder / schedule.checkpoint}: expected the checkpoint of the run's winner, "
                f"member {schedule.member}, with which the trainings are compared, got no folder; "
                "put it back, or repeat the run"
            )
        config = read_config(folder)
        check_inputs(folder, config, command=f"replay {folder}", allow=allow)
        return _replay(folder, config, schedule, repeats or REPEATS, observer)


def _replay(
    folder: Path, config: RunConfig, schedule: Schedule, repeats: int, observer: Observer
) -> Replay:
    start = time.perf_counter()
    plans = [plan for plan in trainings(schedule) for _ in range(repeats)]
    seed = derive(config.seed, "replay")
    # One process replays, with stock AdamW in place of an engine that several share.
    agents = config.agents().replace(seed=seed, engine=config.engine.replace(zero=None))
    cohort, env, adapter = build_parts(config, agents)
    slots = add_agents(cohort, len(plans), "same", adapter)
    # Read before the training, so that a damaged checkpoint shows at once.
    winner = cohort.add_spare(Member(schedule.member, Slot(len(slots))), schedule.last).slot
    load_agent(cohort, winner, folder / schedule.checkpoint)
    observer.started(folder, len(schedule.rounds), 0, None)
    tallies = train(cohort, env, slots, plans, observer)
    observer.stage(len(schedule.rounds) - 1, "test", 0, 1)
    fitness = config.evolve.fitness
    *tested, best = (
        result.score
        for result in evaluate(
            cohort,
            env,
            [*slots, winner],
            env.prompts("test", fitness.test_prompts),
            samples=fitness.test_samples,
            temperature=fitness.temperature,
            stream=("test",),
        )
    )
    cohort.close_engine()
    first = range(0, len(plans), repeats)
    trained = tuple(
        _replayed(plans[i], tallies[i : i + repeats], tested[i : i + repeats]) for i in first
    )
    seconds = time.perf_counter() - start
    found = Replay(schedule, seed, repeats, trained, best, _differences(trained, best), seconds)
    clear_replay(folder)
    files: dict[str, str] = {}
    for i in first:  # not the best: it would be chosen on the test split
        name = plans[i].name
        place = folder / REPLAY / name
        with writing(place, "replay"):
            written = save_agent(cohort, slots[i], place)
            sync_into(folder, place)
        files |= {f"{name}/{file}": digest for file, digest in written.items()}
    found = replace(found, files=files)
    write_replay(folder, found)
    _log.info("%s: replayed in %.1f s", printable(str(folder)), seconds)
    return found


def train(
    cohort: Cohort,
    env: Environment[Any],
    slots: Sequence[Slot],
    plans: Sequence[Training],
    observer: Observer,
) -> list[Tally]:
    """Carry out trainings of equal length side by side, one batch per step for all of them.

    Each slot is a fresh agent for one training. Returns what each agent did, over all rounds.
    """
    tallies = [Tally() for _ in slots]
    watch, starts = Stopwatch(), 0
    for number in range(len(plans[0].hparams)):
        for slot, plan in zip(slots, plans, strict=True):
            cohort.set_hparams(slot, plan.hparams[number])
        of_round = list(zip(*(plan.prompts[number] for plan in plans), strict=True))
        for step, counts in enumerate(of_round):
            observer.stage(number, "learn", step, len(of_round))
            # All take the first of the same prompts, as the agents of a run do.
            prompts = starts_from(env, starts, max(counts))
            starts += max(counts)
            train_step(
                cohort,
                env,
                slots,
                prompts,
                stream=(number, step),
                watch=watch,
                tallies=tallies,
                prompts_per_agent=counts,
            )
    return tallies


def _replayed(plan: Training, tallies: Sequence[Tally], tests: Sequence[Score]) -> Replayed:
    return Replayed(
        name=plan.name,
        values=plan.values,
        budget=plan.budget,
        prompts=plan.prompts,
        rows=plan.rows,
        tokens=round(sum(tally.tokens for tally in tallies) / len(tallies)),
        failed_steps=int(sum(step["failed"] for tally in tallies for step in tally.metrics)),
        tests=tuple(tests),
    )


def _differences(trained: Sequence[Replayed], winner: Score) -> tuple[Difference, ...]:
    tests = {one.name: one.tests for one in trained} | {WINNER: (winner,)}
    pairs = [(f"schedule-{budget}", f"constant-{budget}") for budget in ("lineage", "run")]
    pairs += [(one.name, WINNER) for one in trained]
    return tuple(Difference.between(a, tests[a], b, tests[b]) for a, b in pairs)
