"""Defines compare(run) and replay(run), which train arms: alternatives to a run at equal tokens.

All arms and the run's winner are evaluated on the same test prompts with the same draws, and
`record/arms.py` computes paired differences between them.

compare   trains two populations without evolution, in run folders below RUN/compare: one has the
          values of `algorithm` in all agents, the other has random values from the ranges
replay    trains agents with the winner's schedule, and as many with its last values, each on the
          rows of a whole run, in one cohort with one batch per step
"""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evo_grpo import settings as configuration
from evo_grpo.envs.protocol import Environment
from evo_grpo.errors import CheckpointError, RunDirError
from evo_grpo.escaping import printable
from evo_grpo.evolve.explore.on_copy import NoExploration
from evo_grpo.evolve.select.halving import NoSelection
from evo_grpo.evolve.start import described_start, sample_hparams
from evo_grpo.model.lora.configs import read_config as read_adapter_config
from evo_grpo.model.lora.load import fit_slot
from evo_grpo.population.checkpoints.read import load_agent
from evo_grpo.population.checkpoints.write import save_agent
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.evaluate import evaluate
from evo_grpo.population.rollouts import starts_from
from evo_grpo.population.stats import Stopwatch, Tally
from evo_grpo.population.steps import train_step
from evo_grpo.record import arms, names
from evo_grpo.record import folder as run_folder
from evo_grpo.record.files import atomic_write, remove, seal, sync_into, writing
from evo_grpo.record.observer import Observer, ObserverList, check_observer
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.replay import (
    Replay,
    ReplayArm,
    Schedule,
    Training,
    read_replay,
    read_schedule,
    trainings,
    unmoved,
    write_replay,
)
from evo_grpo.record.run_dir import RunDir
from evo_grpo.record.summary import read_summary
from evo_grpo.schema.validation import whole
from evo_grpo.seeding import derive, generator
from evo_grpo.settings import RunConfig, StopConfig
from evo_grpo.settings.run import check_comparable
from evo_grpo.training import recorded_inputs, resolve, resume_check
from evo_grpo.training.assemble import add_agents, build_parts, prepare
from evo_grpo.training.followers import Followers
from evo_grpo.training.run import play_and_judge
from evo_grpo.types import Member, Score, Slot

ROOM = 2
"""Bound on the steps of a population without evolution, as a multiple of the steps that it is
expected to need, because its completions may be shorter than those of the run."""
REPEATS = 3
"""Trainings of each kind of a replay. With one training each, a third of the pairs with equal
values differ significantly on the test prompts; with three trainings each, 3% do
(docs/replay.md)."""

_log = logging.getLogger(__name__)


# --- compare -------------------------------------------------------------------------------------


def compare(
    run: str | Path,
    *,
    force: bool = False,
    allow: Sequence[str] = (),
    observer: Observer | None = None,
) -> dict[str, Any]:
    """Compare a finished run with the same population without evolution, at equal tokens.

    Two populations train, each in its own run folder below `RUN/compare`, until they have sampled
    as many tokens as the run did in all. Each trains for one round and is evaluated at its end, so
    that the tokens of the run's evaluations go into training. The best agent of each, by
    validation, is tested. An interrupted comparison continues; the result of a finished comparison
    is read from its file.

    Args:
        run: Folder of a finished run.
        force: Train again even if a result exists.
        allow: Your files that may differ from the run's, named as in the error message.
        observer: Gets the progress of both populations, one after the other. The stage "learn"
            counts tokens of the budget.

    Returns:
        The content of RUN/compare/compare.json: `arms`, the last of which is the run, and
        `differences`, each the run minus a population, with its paired interval of 95%. An arm
        has a name, its `tokens` by purpose, and a `test` (mean, standard error, prompts). There is
        no arm `random` if no hyperparameter may differ between agents.

    Raises:
        RunDirError: The run is not finished, or was recorded with objects that no file can name.
        ConfigError: The run has fewer than two agents, or its settings or files have changed.
    """
    observer = observer or Observer()
    check_observer(observer)
    folder = run_folder.expect_run(run)
    config, rounds, summary = _finished(folder)
    if not force and (earlier_result := arms.read_comparison(folder)) is not None:
        return earlier_result
    run_folder.refuse_links_in_run(folder)
    resume_check.check_inputs(folder, config, command=f"resume {folder} --compare", allow=allow)
    # Remove an earlier result first: after an interruption it would describe removed populations.
    remove(folder / names.COMPARISON)
    training = arms.tokens_by_purpose(rounds, summary)["training"]
    budget = arms.tokens_to_train(rounds, summary)
    records_by_arm: dict[str, tuple[Sequence[RoundRecord], dict[str, Any]]] = {}
    for name, init in _starts(config):
        arm = _arm_config(config, name, init, budget, training, len(rounds))
        path = _play(folder, name, arm, budget, observer, force=force)
        arm_summary = read_summary(path)
        assert arm_summary is not None, path
        records_by_arm[name] = (run_folder.read_rounds(path), arm_summary)
    result = arms.comparison(
        config.population.size, {**records_by_arm, arms.EVOLVED: (rounds, summary)}
    )
    atomic_write(folder / names.COMPARISON, seal(result, indent=2))
    return result


def _finished(folder: Path) -> tuple[RunConfig, list[RoundRecord], dict[str, Any]]:
    summary = read_summary(folder)
    if summary is None:
        raise RunDirError(
            f"{folder}: expected a finished run to compare, got one without its summary; finish "
            f"and compare it with: evo-grpo resume {folder} --compare"
        )
    run_folder.refuse_objects(
        folder,
        "so no other population can be trained in the same way; compare a run whose settings "
        "are all in its population.yaml",
    )
    config = run_folder.read_config(folder)
    check_comparable(config)
    return config, run_folder.read_rounds(folder), summary


def _starts(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield the name and the `population.init` of each population that the run is compared with."""
    yield names.COMPARED[0], "same"
    space = config.search_space()
    hparams = config.algorithm.first_hparams(space, run_folder.adapter_of(config.model))
    if space:
        streams = (
            generator(derive(config.seed, "random guess", number))
            for number in range(config.population.size)
        )
        guesses = [sample_hparams(hparams, space, stream) for stream in streams]
        yield names.COMPARED[1], described_start(guesses, hparams, space, config.seed)


def _arm_config(
    config: RunConfig,
    name: str,
    init: Any,  # noqa: ANN401 -- a Start, as YAML has it
    budget: int,
    training: int,
    rounds: int,
) -> RunConfig:
    """Return the configuration of a population without evolution that trains on `budget` tokens.

    The run took `training` tokens for training in its `rounds` rounds.
    """
    population, algorithm = config.population, config.algorithm
    steps = rounds * population.steps_per_round
    expected_steps = math.ceil(steps * budget / max(1, training))
    schedule = algorithm.lr_schedule
    if schedule is not None:
        # The schedule ends at the same share of the training as in the run.
        schedule = schedule.replace(steps=max(1, round(schedule.steps * expected_steps / steps)))
    return config.replace(
        name=f"{config.name}-{name}",
        population=population.replace(
            rounds=1,
            steps_per_round=ROOM * expected_steps,
            sizes="constant",
            init=init,
            stop=StopConfig(no_signal=None),
        ),
        algorithm=algorithm.replace(lr_schedule=schedule),
        # One process trains it, with the same result up to rounding.
        engine=config.engine.replace(zero=None),
        evolve=config.evolve.replace(
            selection=NoSelection(),
            exploration=NoExploration(),
            archive=False,
            dead_steps=None,
        ),
    )


def _play(
    folder: Path, name: str, config: RunConfig, budget: int, observer: Observer, *, force: bool
) -> Path:
    """Train a population in its folder, or resume it; leave a finished population unchanged."""
    path = folder / names.COMPARE / name
    text = f"{names.BASELINE}{budget}\n{configuration.to_yaml(config)}"
    has_same_text = run_folder.is_run(path) and run_folder.config_text(path) == text
    is_same = has_same_text and _has_same_files(path, config)
    if is_same and not force and read_summary(path) is not None:
        return path
    run_dir = (
        RunDir.open(path)
        if is_same and not force
        else RunDir.create(path, config.name, text, force=True)
    )
    limit = TokenLimit(budget)
    with (
        Followers(trackers=False) as followers,
        run_dir,
        prepare(config, resolve.checked_task(config)) as prepared,
    ):
        observers = ObserverList((limit.reported_to(observer), followers))
        play_and_judge(config, path, run_dir, prepared, observers, limit=limit)
    return path


def _has_same_files(path: Path, config: RunConfig) -> bool:
    """Return whether the files of the task are those with which a population was started."""
    if not (path / names.INPUTS).exists():  # stopped before its inputs were recorded
        return True
    return recorded_inputs.read_inputs_of(path).files == recorded_inputs.inputs_of(config).files


class TokenLimit:
    """Ends training after the step in which all agents together have sampled `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._sampled = 0

    def spent(self, tallies: Sequence[Tally]) -> bool:
        """See `Limit`."""
        self._sampled = sum(tally.tokens for tally in tallies)
        return self._sampled >= self.tokens

    def ends_after(self, scores: Sequence[Score | None]) -> bool:
        """See `Limit`."""
        del scores
        return False

    def reported_to(self, observer: Observer) -> Observer:
        """Return `observer` wrapped so that its stage "learn" counts tokens in place of steps."""
        wrapper = ObserverList((observer,))

        def stage(round: int, name: str, done: int, total: int) -> None:
            if name == "learn":
                done, total = min(self._sampled, self.tokens), self.tokens
            observer.stage(round, name, done, total)

        wrapper.stage = stage
        return wrapper


# --- replay --------------------------------------------------------------------------------------


def replay(
    run: str | Path,
    *,
    repeats: int | None = None,
    force: bool = False,
    allow: Sequence[str] = (),
    observer: Observer | None = None,
) -> Replay:
    """Compare the schedule of a run's winner with its last values held constant.

    Agents are trained from scratch with the schedule and with the last values, several times each
    and with the tokens of the whole run. They have the run's data, test split and order of prompts;
    all other draws use a seed derived from the run's seed. At the end, replay.json and a checkpoint
    of the first training of each kind are written to `RUN/replay`; an interrupted replay leaves the
    files of an earlier replay unchanged.

    Args:
        run: The run folder.
        repeats: Trainings of each kind, >= 1; None takes 3, or the number of a finished replay.
            With one training no difference is reported as significant, because the test does not
            cover the randomness of training.
        force: Train again even if a finished replay exists.
        allow: Your files that may differ from the run's, named as in the error message.
        observer: Gets `note` if no hyperparameter changed on the winner's line, `started`, and
            `stage` before each step and the test. The stage "learn" counts the completions of the
            whole replay; completions of the test are weighted by their time.

    Raises:
        RunDirError: The run is not finished, its winner trained for a single round, it was recorded
            with objects that no file can name, or another process uses it.
        ConfigError: The settings or the files of the run have changed.
        CheckpointError: The winner's checkpoint is missing or damaged.
    """
    observer = observer or Observer()
    check_observer(observer)
    if repeats is not None:
        whole(1).check("repeats", repeats)
    schedule = read_schedule(run)
    with RunDir.open(run) as run_dir:
        folder = run_dir.path
        earlier = None if force else read_replay(folder)
        if earlier is not None and repeats in (None, earlier.repeats):
            return earlier
        if not (folder / schedule.checkpoint).is_dir():
            raise CheckpointError(
                f"{folder / schedule.checkpoint}: expected the checkpoint of the run's winner, "
                f"member {schedule.member}, with which the trainings are compared, got no folder; "
                "put it back, or repeat the run"
            )
        config = run_folder.read_config(folder)
        resume_check.check_inputs(folder, config, command=f"replay {folder}", allow=allow)
        if sentence := unmoved(schedule):
            observer.note(sentence)
        return _replay(folder, config, schedule, repeats or REPEATS, observer)


def _replay(
    folder: Path, config: RunConfig, schedule: Schedule, repeats: int, observer: Observer
) -> Replay:
    start = time.perf_counter()
    plans = [plan for plan in trainings(schedule) for _ in range(repeats)]
    seed = derive(config.seed, "replay")
    # One process trains all arms, with stock AdamW even if the run divides its optimizer.
    agents = config.agents().replace(seed=seed, engine=config.engine.replace(zero=None))
    cohort, env, adapter = build_parts(config, agents)
    slots = add_agents(cohort, len(plans), "same", adapter)
    # Load the winner before training, so that a damaged checkpoint shows at once.
    winner = cohort.add_spare(Member(schedule.member, Slot(len(slots))), schedule.last).slot
    # A mean of agents with different LoRA ranks has the larger rank.
    checkpoint = folder / schedule.checkpoint
    fit_slot(cohort.slots, cohort.agents[winner].adapter, read_adapter_config(checkpoint / "actor"))
    load_agent(cohort, winner, checkpoint)
    fitness = config.evolve.fitness
    test_slots = [*slots, winner]
    samples = fitness.per_prompt(fitness.test_samples)
    to_test = len(test_slots) * fitness.test_prompts * samples
    observer.started(folder, len(schedule.rounds), 0, None)
    tallies = train(cohort, env, slots, plans, observer, to_test=to_test)
    observer.stage(len(schedule.rounds) - 1, "test", 0, 1)
    *tested, best = (
        result.score
        for result in evaluate(
            cohort,
            env,
            test_slots,
            env.prompts("test", fitness.test_prompts),
            samples=samples,
            temperature=fitness.temperature,
            reward=fitness.counted,
            stream=("test",),
        )
    )
    cohort.close_engine()
    first_indices = range(0, len(plans), repeats)
    trained = tuple(
        _replayed(plans[i], tallies[i : i + repeats], tested[i : i + repeats])
        for i in first_indices
    )
    seconds = time.perf_counter() - start
    outcome = Replay(schedule, seed, repeats, trained, best, _differences(trained, best), seconds)
    for name in names.REPLAY_PARTS:
        remove(folder / name)
    files: dict[str, str] = {}
    for i in first_indices:  # not the best, which would be chosen on the test split
        name = plans[i].name
        target = folder / names.REPLAY / name
        with writing(target, "replay"):
            digests = save_agent(cohort, slots[i], target)
            sync_into(folder, target)
        files |= {f"{name}/{file}": digest for file, digest in digests.items()}
    outcome = replace(outcome, files=files)
    write_replay(folder, outcome)
    _log.info("%s: replayed in %.1f s", printable(str(folder)), seconds)
    return outcome


def train(
    cohort: Cohort,
    env: Environment[Any],
    slots: Sequence[Slot],
    plans: Sequence[Training],
    observer: Observer,
    *,
    to_test: int,
) -> list[Tally]:
    """Run trainings of equal length together, one batch per step; return the tally of each agent.

    Each slot holds a fresh agent, which trains by the plan with the same index. The `to_test`
    completions of the test count as remaining work.
    """
    tallies = [Tally() for _ in slots]
    watch, starts, rows = Stopwatch(), 0, sum(plan.rows for plan in plans)
    sampled = 0
    for round_index in range(len(plans[0].hparams)):
        values = [plan.hparams[round_index] for plan in plans]
        for slot, hparams in zip(slots, values, strict=True):
            cohort.set_hparams(slot, hparams)
        prompt_counts = list(zip(*(plan.prompts[round_index] for plan in plans), strict=True))
        for step, counts in enumerate(prompt_counts):
            seconds = sum(watch.seconds.values())
            sampling = 1 - watch.seconds.get("learn", 0) / seconds if seconds else 1.0
            observer.stage(round_index, "learn", sampled, rows + round(sampling * to_test))
            # As in a run, all agents take the first of the same prompts.
            prompts = starts_from(env, starts, max(counts))
            starts += train_step(
                cohort,
                env,
                slots,
                prompts,
                stream=(round_index, step),
                watch=watch,
                tallies=tallies,
                prompts_per_agent=counts,
                first=starts,
            )
            sampled += sum(
                count * hparams.group_size for count, hparams in zip(counts, values, strict=True)
            )
    return tallies


def _replayed(plan: Training, tallies: Sequence[Tally], tests: Sequence[Score]) -> ReplayArm:
    return ReplayArm(
        name=plan.name,
        prompts=plan.prompts,
        rows=plan.rows,
        tokens=round(sum(tally.tokens for tally in tallies) / len(tallies)),
        failed_steps=int(sum(step["failed"] for tally in tallies for step in tally.metrics)),
        tests=tuple(tests),
    )


def _differences(trained: Sequence[ReplayArm], winner: Score) -> tuple[arms.Difference, ...]:
    tests = {replayed.name: replayed.tests for replayed in trained} | {arms.WINNER: (winner,)}
    pairs = [names.REPLAYED, *((replayed.name, arms.WINNER) for replayed in trained)]
    return tuple(arms.Difference.between(a, tests[a], b, tests[b]) for a, b in pairs)
