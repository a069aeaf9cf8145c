"""One round: agents train, are evaluated, saved and selected; the next ones are copied and mutated.

Read `play_round` top to bottom; each stage is one call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from evo_grpo.cohort.cohort import Cohort
from evo_grpo.cohort.sampler import PopulationSampler
from evo_grpo.envs.protocol import Environment, Experience, StartT
from evo_grpo.errors import RunFailedError, ShapeError
from evo_grpo.evaluate import race, weighted, why_unranked
from evo_grpo.evolve.decide import Standing, Strategy, decide, keep_all, why_collapsed
from evo_grpo.evolve.explore.protocol import Trial
from evo_grpo.evolve.generation import Generation
from evo_grpo.learner.rows import AgentBatch, rows_from_trajectories
from evo_grpo.no_signal import warn_without_signal
from evo_grpo.objective.advantages import group_advantages
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord, SavedAgent
from evo_grpo.round_stats import Stopwatch, Tally, completion_rows, reward_metrics, round_record
from evo_grpo.rules import RoundSettings
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.seeding import derive, generator
from evo_grpo.types import KEPT_SCORES, Decision, Member, Score, Slot


class RunWriter(Protocol):
    """Where a round is written: a run folder, or nowhere."""

    def checkpoint(self, cohort: Cohort, round: int, slot: Slot) -> SavedAgent:
        """Save an agent as it was evaluated; return where, and the digests of its files."""
        ...

    def commit(self, record: RoundRecord, completions: Sequence[Mapping[str, Any]]) -> None:
        """Write a finished round: wholly, or not at all."""
        ...


class Limit(Protocol):
    """What ends training before all rounds are played."""

    def spent(self, tallies: Sequence[Tally]) -> bool:
        """Say after a step, from the round's tallies so far, whether it was the last step."""
        ...

    def reached(self, scores: Sequence[Score | None]) -> bool:
        """Say after an evaluation whether the round was the last."""
        ...


def train_step(
    cohort: Cohort,
    env: Environment[StartT],
    slots: Sequence[Slot],
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
    parts = zip(slots, tallies, experiences, sampler.group_sizes, metrics, strict=True)
    for slot, tally, experience, size, values in parts:
        totals = weighted(experience.rewards, env.weights)
        counted = reward_metrics(experience, totals, size, env.weights)
        tally.metrics.append({**values, **counted})
        state = cohort.agents[slot]
        state.dead_steps = state.dead_steps + 1 if counted["zero_variance"] == 1 else 0
        tally.tokens += experience.tokens
        tally.completions += experience.completions
        first_group = experience.trajectories[:size]
        tally.samples = list(zip(first_group, totals[:size].tolist(), strict=True))


def play_round(  # noqa: PLR0913 -- a round meets all parts of a run
    cohort: Cohort,
    env: Environment[Any],
    settings: RoundSettings,
    slots: Sequence[Slot],
    round: int,
    *,
    writer: RunWriter,
    observer: Observer,
    limit: Limit | None = None,
    past: Sequence[RoundRecord] = (),
) -> RoundRecord:
    """Train, evaluate, save, select and mutate.

    Args:
        cohort: The agents.
        env: Prompts and rewards.
        settings: How.
        slots: The agents that play the round.
        round: 0-based.
        writer: Where it is written.
        observer: Told about progress.
        limit: Ends training early; None plays all rounds.
        past: The rounds before it, as far as they are known.

    Returns:
        The round as recorded. The cohort already holds the next generation, whose slots are
        `next_slots(record)`.

    Raises:
        RunFailedError: When no agent is left that can be ranked.
    """
    watch = Stopwatch()
    start = time.perf_counter()
    tallies = [Tally() for _ in slots]
    counts = settings.prompts_of([cohort.agents[slot].hparams.group_size for slot in slots])
    # Starts are handed out in one sequence, without gaps however many a step takes.
    starts = past[-1].starts if past else round * sum(map(max, counts))
    for step, of_agents in enumerate(counts):
        observer.stage(round, "learn", step, settings.steps_per_round)
        prompts = starts_from(env, starts, max(of_agents))
        starts += max(of_agents)
        train_step(
            cohort,
            env,
            slots,
            prompts,
            stream=(round, step),
            watch=watch,
            tallies=tallies,
            prompts_per_agent=of_agents,
        )
        if limit is not None and limit.spent(tallies):
            break
    observer.stage(round, "evaluate", 0, 1)
    with watch.phase("evaluate"):
        scores, evaluation_tokens = _fitness(cohort, env, settings, slots, round, tallies)
    with watch.phase("checkpoint"):
        saved = [writer.checkpoint(cohort, round, slot) for slot in slots]
    # The limit comes first, for it hears of every evaluation.
    last = (limit is not None and limit.reached(scores)) or round + 1 >= settings.rounds
    with watch.phase("evolve"):
        generation, decisions = _evolve(
            cohort, settings, slots, round, scores, tallies, past, last=last
        )
        if settings.archive:
            _archive_best(cohort, slots, scores)
    record = round_record(
        cohort, slots, round, tallies, scores, saved, generation, watch, time.perf_counter() - start
    )
    record = replace(
        record, decisions=decisions, starts=starts, evaluation_tokens=evaluation_tokens
    )
    writer.commit(record, completion_rows(round, slots, tallies, settings.completions))
    # Before a slot is overwritten: after a crash in between, a resume applies the record again.
    apply(cohort, slots, generation, inherit_optimizer=settings.inherit_optimizer)
    observer.round_done(record)
    warn_without_signal(round, tallies)
    return record


def starts_from(env: Environment[StartT], first: int, count: int) -> list[StartT]:
    """Return training starts by their place in the sequence that all batches of any size cut.

    Args:
        env: Gives them in batches: batch `k` of size `n` begins at start `k * n`.
        first: The first start, >= 0.
        count: How many, >= 1.
    """
    size = math.gcd(first, count)
    steps = range(first // size, (first + count) // size)
    return [start for step in steps for start in env.batch(step, size)]


def apply(
    cohort: Cohort, slots: Sequence[Slot], generation: Generation, *, inherit_optimizer: bool
) -> None:
    """Make the cohort the next generation.

    Parents are copied over children, each agent gets its hyperparameters and its member and keeps
    its latest `KEPT_SCORES` scores, and the agents that leave are removed with their memory. A plan
    never copies from a slot that it overwrites, so the order of the copies does not matter.

    Args:
        cohort: The agents.
        slots: Those of this round.
        generation: Those of the next round.
        inherit_optimizer: Whether copies take their parent's AdamW moments.
    """
    for parent, slot in zip(generation.parents, generation.slots, strict=True):
        if parent != slot:
            cohort.copy(parent, slot, inherit_optimizer=inherit_optimizer)
    for member, hparams in zip(generation.members, generation.hparams, strict=True):
        cohort.set_hparams(member.agent, hparams)
        cohort.set_member(member.agent, member)
        # Here and not where a score is added: a restored cohort comes by here too.
        del cohort.agents[member.agent].history[:-KEPT_SCORES]
    remaining = set(generation.slots)
    for slot in slots:
        if slot not in remaining:
            cohort.remove(slot)


def next_slots(record: RoundRecord) -> tuple[Slot, ...]:
    """Return the agents that play the round after a recorded one."""
    return tuple(member.agent for member in record.members)


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
    settings: RoundSettings,
    slots: Sequence[Slot],
    round: int,
    tallies: Sequence[Tally],
) -> tuple[list[Score | None], int]:
    """Score every agent, None for one whose update or evaluation was not finite; and count tokens.

    Returns:
        The scores, and the tokens that were sampled for them.
    """
    results, tokens = race(
        cohort,
        env,
        slots,
        prompts=settings.eval_prompts,
        samples=settings.eval_samples,
        temperature=settings.eval_temperature,
        extra=settings.eval_extra,
        keep=settings.room(round + 1, len(slots)),
        round=round,
    )
    scores: list[Score | None] = []
    for slot, tally, result in zip(slots, tallies, results, strict=True):
        usable = not tally.failed and np.isfinite(result.score.mean)
        scores.append(result.score if usable else None)
        if usable:
            cohort.agents[slot].history.append(result.score)
        else:
            cohort.agents[slot].history.clear()
    if all(score is None for score in scores) and cohort.archive is None:
        raise RunFailedError(
            f"round {round}: no agent has a finite update and fitness, so none can be a parent; "
            f"{why_unranked(env.name, results)}"
        )
    return scores, tokens


def _evolve(
    cohort: Cohort,
    settings: RoundSettings,
    slots: Sequence[Slot],
    round: int,
    scores: Sequence[Score | None],
    tallies: Sequence[Tally],
    past: Sequence[RoundRecord],
    *,
    last: bool,
) -> tuple[Generation, tuple[Decision, ...]]:
    states = [cohort.agents[slot] for slot in slots]
    archive = cohort.archive if settings.archive else None
    reasons = why_each_collapsed(
        settings,
        scores,
        [tally.means().get("kl", 0.0) for tally in tallies],
        [state.dead_steps for state in states],
        archive,
        last=last,
    )
    for state, reason in zip(states, reasons, strict=True):
        state.collapsed = reason
    if last:
        # Nothing trains after the last round: selecting there would only overwrite evaluated
        # agents.
        return keep_all(states, cohort.next_member, drop=settings.dead_steps is not None)
    return next_agents(
        settings,
        states,
        scores,
        archive,
        past,
        round=round,
        hp_config=cohort.hp_config,
        seed=cohort.seed,
        next_id=cohort.next_member,
    )


def next_agents(  # noqa: PLR0913 -- a plan is made of all that a round has found
    settings: RoundSettings,
    standings: Sequence[Standing],
    scores: Sequence[Score | None],
    archive: Standing | None,
    past: Sequence[RoundRecord],
    *,
    round: int,
    hp_config: HyperparameterConfig,
    seed: int,
    next_id: int,
) -> tuple[Generation, tuple[Decision, ...]]:
    """Return the agents of the next round; nothing is drawn but from the round's own stream.

    Args:
        settings: How rounds are played.
        standings: The agents of the round, by position.
        scores: Theirs, None for an agent that failed.
        archive: The best agent ever, None where none is kept.
        past: The rounds before it.
        round: The round, which is not the last.
        hp_config: Which hyperparameters may change, within which bounds.
        seed: Seed of the run.
        next_id: A member id that no member of the run has had.
    """
    played = [(a.hparams, a.score, record.round) for record in past for a in record.agents]
    played += [(s.hparams, score, round) for s, score in zip(standings, scores, strict=True)]
    return decide(
        standings,
        settings.room(round + 1, len(standings)),
        archive,
        Strategy(
            settings.selector,
            settings.explorer,
            hp_config,
            settings.significance,
            settings.window,
        ),
        generator(derive(seed, "evolve", round)),
        round=round,
        next_id=next_id,
        trials=[
            Trial(hparams, math.nan if score is None else score.mean, number)
            for hparams, score, number in played
        ],
    )


def why_each_collapsed(
    settings: RoundSettings,
    scores: Sequence[Score | None],
    kls: Sequence[float],
    dead_steps: Sequence[int],
    archive: Standing | None,
    *,
    last: bool,
) -> list[str]:
    """Return why each agent can no longer learn, an empty string for one that can.

    Args:
        settings: How rounds are played.
        scores: Of the agents, None for one that failed.
        kls: Their mean KL divergence from the reference, nats per token.
        dead_steps: Their latest steps in a row in which all groups had equal rewards.
        archive: The best agent ever, None where none is kept.
        last: Whether the round is the last.
    """
    if not settings.dead_steps:
        return [""] * len(scores)
    ranked = [score for score in scores if score is not None]
    if archive is not None:
        ranked.append(archive.history[-1])
    # After the last round there are no further steps in which a dead agent could learn.
    enough = 1 if last else settings.dead_steps
    best = max(ranked, key=lambda score: score.mean, default=None)
    return [
        ""
        if score is None or best is None
        else why_collapsed(score, best, kl, dead if dead >= enough else 0, last=last)
        for score, kl, dead in zip(scores, kls, dead_steps, strict=True)
    ]


def _archive_best(cohort: Cohort, slots: Sequence[Slot], scores: Sequence[Score | None]) -> None:
    """Keep the best agent of a round where no earlier one was as good."""
    ranked = [(slot, score) for slot, score in zip(slots, scores, strict=True) if score is not None]
    for slot, score in sorted(ranked, key=lambda pair: -pair[1].mean)[:1]:
        if cohort.archive is None or score.mean > cohort.archive.history[-1].mean:
            cohort.put_into_archive(slot, score)


def recorded_parents(
    record: RoundRecord, previous: Sequence[Member], archive: Slot | None = None
) -> tuple[Slot, ...]:
    """Return the slot that the weights of each agent of the next round come from, as recorded.

    Args:
        record: A finished round.
        previous: The members that played it.
        archive: Slot of the best agent ever, where one is kept.

    Returns:
        One slot per member of `record.members`: its own for a survivor.
    """
    slots: dict[int | None, Slot] = {member.id: member.agent for member in previous}
    return tuple(
        archive
        if archive is not None and member.mutation.op == "restore" and member.id not in slots
        else slots.get(member.id, slots.get(member.parent, member.agent))
        for member in record.members
    )
