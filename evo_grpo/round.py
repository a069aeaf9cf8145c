"""One round: all agents train and are evaluated, the better are copied over the worse, all is kept.

Read `play_round` top to bottom; each stage is one call.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from evo_grpo.cohort.cohort import Cohort
from evo_grpo.cohort.sampler import PopulationSampler
from evo_grpo.envs.protocol import Environment, Experience, StartT
from evo_grpo.errors import RunFailedError, ShapeError
from evo_grpo.evaluate import Evaluation, evaluate, weighted, why_unranked
from evo_grpo.evolve.generation import Generation, next_generation
from evo_grpo.evolve.mutate import Mutations
from evo_grpo.evolve.select import Selector
from evo_grpo.learner.rows import AgentBatch, rows_from_trajectories
from evo_grpo.objective.advantages import group_advantages
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord, SavedAgent
from evo_grpo.round_stats import Stopwatch, Tally, completion_rows, reward_metrics, round_record
from evo_grpo.seeding import derive, generator
from evo_grpo.types import Member, Score


@dataclass(frozen=True)
class Schedule:
    """How a population trains and evolves.

    Attributes:
        rounds: Rounds in all.
        steps_per_round: GRPO steps of every agent per round.
        prompts_per_step: P, the same prompts or episode seeds for every agent.
        selector: Who survives.
        mutations: What changes in the survivors.
        eval_prompts: Validation prompts behind a fitness.
        eval_samples: Completions per validation prompt.
        eval_temperature: The same for all agents.
        inherit_optimizer: Children take their parent's AdamW moments; False starts them afresh.
        completions: Sample completions kept per agent and round.
    """

    rounds: int
    steps_per_round: int
    prompts_per_step: int
    selector: Selector
    mutations: Mutations
    eval_prompts: int = 64
    eval_samples: int = 1
    eval_temperature: float = 1.0
    inherit_optimizer: bool = True
    completions: int = 2


class RunWriter(Protocol):
    """Where a round is written: a run folder, or nowhere."""

    def checkpoint(self, cohort: Cohort, round: int, slot: int) -> SavedAgent:
        """Save an agent as it was evaluated; return where, and the digests of its files."""
        ...

    def commit(self, record: RoundRecord, completions: Sequence[Mapping[str, Any]]) -> None:
        """Write a finished round: wholly, or not at all."""
        ...


class Limit(Protocol):
    """What ends training before the rounds of a schedule are over."""

    def spent(self, tallies: Sequence[Tally]) -> bool:
        """Say after a step, from the round's tallies so far, whether it was the last step."""
        ...

    def reached(self, scores: Sequence[Score | None]) -> bool:
        """Say after an evaluation whether the round was the last."""
        ...


def train_step(
    cohort: Cohort,
    env: Environment[StartT],
    slots: Sequence[int],
    prompts: Sequence[StartT],
    *,
    stream: Sequence[str | int],
    watch: Stopwatch,
    tallies: Sequence[Tally],
    prompts_per_agent: Sequence[int] | None = None,
) -> None:
    """Take one GRPO step with every agent: generate, score, learn.

    One generation call per turn, one scoring, one fused forward and backward.

    Args:
        cohort: The agents.
        env: What they train in.
        slots: Which agents, in the order of `tallies`.
        prompts: P starts, one list for all agents: prompts, or seeds of episodes.
        stream: Path of the step's random streams.
        watch: Gets the seconds of generate, reward and learn; an environment's own time counts as
            reward.
        tallies: Get metrics, token counts and sample completions.
        prompts_per_agent: P_i by agent, each in [1, P]: agent i takes the first P_i prompts. None
            gives every agent all of them.

    Raises:
        ShapeError: `prompts_per_agent` does not fit the agents and prompts.
    """
    starts = _first_prompts(prompts, prompts_per_agent, len(slots))
    sampler = PopulationSampler.in_training(cohort, slots, stream=("sample", *stream))
    with watch.phase("reward"):
        play = env.begin(starts, sampler.group_sizes)
    while (ask := play.ask()) is not None:
        with watch.phase("generate"):
            groups = sampler.sample(ask)
        with watch.phase("reward"):
            play.tell(groups)
    with watch.phase("reward"):
        experiences = play.experiences()
    advantages = _advantages(cohort, env, sampler.group_sizes, experiences)
    batches = [
        AgentBatch(slot, rows_from_trajectories(experience.trajectories, values))
        for slot, experience, values in zip(slots, experiences, advantages, strict=True)
    ]
    with watch.phase("learn"):
        metrics = cohort.learn(batches, stream=("learn", *stream))
    parts = zip(tallies, experiences, sampler.group_sizes, metrics, strict=True)
    for tally, experience, size, values in parts:
        totals = weighted(experience.rewards, env.weights)
        tally.metrics.append({**values, **reward_metrics(experience, totals, size, env.weights)})
        tally.tokens += experience.tokens
        tally.completions += experience.completions
        first_group = experience.trajectories[:size]
        tally.samples = list(zip(first_group, totals[:size].tolist(), strict=True))


def play_round(
    cohort: Cohort,
    env: Environment[Any],
    schedule: Schedule,
    slots: Sequence[int],
    round: int,
    *,
    writer: RunWriter,
    observer: Observer,
    limit: Limit | None = None,
) -> RoundRecord:
    """Train, evaluate, keep, select and mutate.

    Args:
        cohort: The agents.
        env: Prompts and rewards.
        schedule: How.
        slots: The population; records know an agent by its slot.
        round: 0-based.
        writer: Where it is written.
        observer: Follows the progress.
        limit: Ends training early; None leaves it to the schedule.

    Returns:
        The round as recorded; the cohort already holds the next generation.

    Raises:
        RunFailedError: When no agent is left that can be ranked.
    """
    watch = Stopwatch()
    start = time.perf_counter()
    tallies = [Tally() for _ in slots]
    for step in range(schedule.steps_per_round):
        observer.stage(round, "learn", step, schedule.steps_per_round)
        number = round * schedule.steps_per_round + step
        prompts = env.batch(number, schedule.prompts_per_step)
        train_step(cohort, env, slots, prompts, stream=(round, step), watch=watch, tallies=tallies)
        if limit is not None and limit.spent(tallies):
            break
    observer.stage(round, "evaluate", 0, 1)
    with watch.phase("evaluate"):
        scores = _fitness(cohort, env, schedule, slots, round, tallies)
    with watch.phase("checkpoint"):
        saved = [writer.checkpoint(cohort, round, slot) for slot in slots]
    # The limit comes first, for it hears of every evaluation.
    last = (limit is not None and limit.reached(scores)) or round + 1 >= schedule.rounds
    with watch.phase("evolve"):
        generation = _evolve(cohort, schedule, slots, round, scores, last=last)
    record = round_record(
        cohort, slots, round, tallies, scores, saved, generation, watch, time.perf_counter() - start
    )
    writer.commit(record, completion_rows(round, slots, tallies, schedule.completions))
    # Before a slot is overwritten: after a crash in between, a resume applies the record again.
    apply(cohort, slots, generation, inherit_optimizer=schedule.inherit_optimizer)
    observer.round_done(record)
    return record


def apply(
    cohort: Cohort, slots: Sequence[int], generation: Generation, *, inherit_optimizer: bool
) -> None:
    """Make the cohort the next generation.

    Parents are copied over children, then each is given what it trains with.

    A plan never copies from a slot that it overwrites, so the order does not matter.
    """
    for agent, parent in enumerate(generation.parents):
        if parent != agent:
            cohort.copy(slots[parent], slots[agent], inherit_optimizer=inherit_optimizer)
    for agent, slot in enumerate(slots):
        cohort.set_hparams(slot, generation.hparams[agent])
        cohort.set_member(slot, generation.members[agent])


def _first_prompts(
    prompts: Sequence[StartT], counts: Sequence[int] | None, agents: int
) -> list[Sequence[StartT]]:
    """Return the prompts of each agent: the first P_i of the list that all share."""
    if counts is None:
        return [prompts] * agents
    if len(counts) != agents or not all(1 <= count <= len(prompts) for count in counts):
        raise ShapeError(
            f"prompts_per_agent: expected {agents} counts, one per agent, each from 1 to "
            f"P = {len(prompts)}, got {list(counts)}; leave out an agent that is not to train"
        )
    return [prompts[:count] for count in counts]


def _advantages(
    cohort: Cohort,
    env: Environment[Any],
    group_sizes: Sequence[int],
    experiences: Sequence[Experience],
) -> list[np.ndarray]:
    scale = cohort.settings.algorithm.adv_scale
    return [
        group_advantages(e.rewards, size, scale=scale, weights=env.weights)
        for e, size in zip(experiences, group_sizes, strict=True)
    ]


def _fitness(
    cohort: Cohort,
    env: Environment[Any],
    schedule: Schedule,
    slots: Sequence[int],
    round: int,
    tallies: Sequence[Tally],
) -> list[Score | None]:
    """Score every agent; None for one whose update or evaluation was not finite."""
    prompts = env.prompts("validation", schedule.eval_prompts)
    results: list[Evaluation] = evaluate(
        cohort,
        env,
        slots,
        prompts,
        samples=schedule.eval_samples,
        temperature=schedule.eval_temperature,
        stream=("evaluate", round),
    )
    scores: list[Score | None] = []
    for slot, tally, result in zip(slots, tallies, results, strict=True):
        usable = not tally.failed and np.isfinite(result.score.mean)
        scores.append(result.score if usable else None)
        if usable:
            cohort.agents[slot].history.append(result.score)
        else:
            cohort.agents[slot].history.clear()
    if all(score is None for score in scores):
        raise RunFailedError(
            f"round {round}: no agent has a finite update and fitness, so none can be a parent; "
            f"{why_unranked(env.name, results)}"
        )
    return scores


def _evolve(
    cohort: Cohort,
    schedule: Schedule,
    slots: Sequence[int],
    round: int,
    scores: Sequence[Score | None],
    *,
    last: bool,
) -> Generation:
    states = [cohort.agents[slot] for slot in slots]
    members = tuple(s.member for s in states)
    hparams = tuple(s.hparams for s in states)
    if last:
        # Nothing trains after the last round: selecting there would only overwrite evaluated
        # agents.
        return Generation(members, hparams, tuple(range(len(slots))), cohort.next_member)
    rng = generator(derive(cohort.seed, "evolve", round))
    plan = schedule.selector.plan(
        [s.history if ok is not None else [] for s, ok in zip(states, scores, strict=True)], rng
    )
    return next_generation(
        plan,
        members,
        hparams,
        schedule.mutations,
        cohort.hp_config,
        rng,
        round=round,
        next_id=cohort.next_member,
    )


def members_from(record: RoundRecord, previous: Sequence[Member]) -> tuple[int, ...]:
    """Return the slot each agent of the next round is copied from, as recorded.

    A survivor's is its own.

    Args:
        record: A finished round.
        previous: Its members, by agent.
    """
    where = {member.id: agent for agent, member in enumerate(previous)}
    parents: list[int] = []
    for agent, member in enumerate(record.members):
        source = member.id if member.id in where else member.parent
        parents.append(where.get(-1 if source is None else source, agent))
    return tuple(parents)
