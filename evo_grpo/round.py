"""One round: agents train, are evaluated, saved and selected; the next ones are copied and mutated.

Read `play_round` top to bottom; each stage is one call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from evo_grpo.cohort.cohort import Cohort
from evo_grpo.cohort.sampler import PopulationSampler
from evo_grpo.envs.protocol import Environment, Experience, StartT
from evo_grpo.errors import ConfigError, RunFailedError, ShapeError
from evo_grpo.evaluate import Evaluation, evaluate, weighted, why_unranked
from evo_grpo.evolve.explore.protocol import Explorer
from evo_grpo.evolve.generation import Generation, next_generation
from evo_grpo.evolve.select.protocol import Selector
from evo_grpo.learner.rows import AgentBatch, rows_from_trajectories
from evo_grpo.objective.advantages import group_advantages
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord, SavedAgent
from evo_grpo.round_stats import Stopwatch, Tally, completion_rows, reward_metrics, round_record
from evo_grpo.seeding import derive, generator
from evo_grpo.types import Member, Score, Slot


@dataclass(frozen=True)
class RoundSettings:
    """How the rounds of a run are played.

    Attributes:
        rounds: Rounds in all.
        steps_per_round: GRPO steps of every agent per round.
        prompts_per_step: P, the same prompts or episode seeds for every agent.
        selector: Plans who survives, and who is copied.
        explorer: Varies the hyperparameters of those that go on.
        window: Latest scores of a member that the selector sees, >= 1.
        places: Agents that each round has room for: by round (0-based), or one number per round,
            the last of which repeats. Where a round has fewer places than agents, agents leave.
            None has room for all of them.
        eval_prompts: Validation prompts behind a fitness.
        eval_samples: Completions per validation prompt.
        eval_temperature: The same for all agents.
        inherit_optimizer: Copies take their parent's AdamW moments; False starts them afresh.
        completions: Sample completions kept per agent and round.

    Raises:
        ConfigError: A sequence of places is empty, grows, or leaves no place.
    """

    rounds: int
    steps_per_round: int
    prompts_per_step: int
    selector: Selector
    explorer: Explorer
    window: int = 1
    places: Callable[[int], int] | Sequence[int] | None = None
    eval_prompts: int = 64
    eval_samples: int = 1
    eval_temperature: float = 1.0
    inherit_optimizer: bool = True
    completions: int = 2

    def __post_init__(self) -> None:
        """Refuse places that no population could fill."""
        if self.places is None or callable(self.places):
            return
        grows = any(later > earlier for earlier, later in pairwise(self.places))
        if not self.places or grows or min(self.places) < 1:
            raise ConfigError(
                "places: expected at least one number >= 1, none above the one before it, got "
                f"{list(self.places)}; an agent that has left does not come back"
            )

    def room(self, round: int, agents: int) -> int:
        """Return how many of `agents` agents a round has places for.

        Raises:
            ConfigError: There is none.
        """
        if self.places is None:
            return agents
        if callable(self.places):
            places = self.places(round)
        else:
            places = self.places[min(round, len(self.places) - 1)]
        if places < 1:
            raise ConfigError(f"places: expected at least 1 in round {round}, got {places}")
        return min(places, agents)


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
    settings: RoundSettings,
    slots: Sequence[Slot],
    round: int,
    *,
    writer: RunWriter,
    observer: Observer,
    limit: Limit | None = None,
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

    Returns:
        The round as recorded. The cohort already holds the next generation, whose slots are
        `next_slots(record)`.

    Raises:
        RunFailedError: When no agent is left that can be ranked.
    """
    watch = Stopwatch()
    start = time.perf_counter()
    tallies = [Tally() for _ in slots]
    for step in range(settings.steps_per_round):
        observer.stage(round, "learn", step, settings.steps_per_round)
        number = round * settings.steps_per_round + step
        prompts = env.batch(number, settings.prompts_per_step)
        train_step(cohort, env, slots, prompts, stream=(round, step), watch=watch, tallies=tallies)
        if limit is not None and limit.spent(tallies):
            break
    observer.stage(round, "evaluate", 0, 1)
    with watch.phase("evaluate"):
        scores = _fitness(cohort, env, settings, slots, round, tallies)
    with watch.phase("checkpoint"):
        saved = [writer.checkpoint(cohort, round, slot) for slot in slots]
    # The limit comes first, for it hears of every evaluation.
    last = (limit is not None and limit.reached(scores)) or round + 1 >= settings.rounds
    with watch.phase("evolve"):
        generation = _evolve(cohort, settings, slots, round, scores, last=last)
    record = round_record(
        cohort, slots, round, tallies, scores, saved, generation, watch, time.perf_counter() - start
    )
    writer.commit(record, completion_rows(round, slots, tallies, settings.completions))
    # Before a slot is overwritten: after a crash in between, a resume applies the record again.
    apply(cohort, slots, generation, inherit_optimizer=settings.inherit_optimizer)
    observer.round_done(record)
    return record


def apply(
    cohort: Cohort, slots: Sequence[Slot], generation: Generation, *, inherit_optimizer: bool
) -> None:
    """Make the cohort the next generation.

    Parents are copied over children, each agent gets its hyperparameters and its member, and the
    agents that leave are removed with their memory. A plan never copies from a slot that it
    overwrites, so the order of the copies does not matter.

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
) -> list[Score | None]:
    """Score every agent; None for one whose update or evaluation was not finite."""
    prompts = env.prompts("validation", settings.eval_prompts)
    results: list[Evaluation] = evaluate(
        cohort,
        env,
        slots,
        prompts,
        samples=settings.eval_samples,
        temperature=settings.eval_temperature,
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
    settings: RoundSettings,
    slots: Sequence[Slot],
    round: int,
    scores: Sequence[Score | None],
    *,
    last: bool,
) -> Generation:
    states = [cohort.agents[slot] for slot in slots]
    members = tuple(state.member for state in states)
    hparams = tuple(state.hparams for state in states)
    if last:
        # Nothing trains after the last round: selecting there would only overwrite evaluated
        # agents.
        return Generation(members, hparams, tuple(slots), cohort.next_member)
    rng = generator(derive(cohort.seed, "evolve", round))
    places = settings.room(round + 1, len(slots))
    histories = [
        [] if score is None else state.history[-settings.window :]
        for state, score in zip(states, scores, strict=True)
    ]
    plan = settings.selector.plan(histories, places, rng)
    if len(plan) > places:
        raise ShapeError(
            f"plan: expected at most {places} offspring, one per place of round {round + 1}, got "
            f"{len(plan)} from {type(settings.selector).__name__}; leave out the worst agents"
        )
    return next_generation(
        plan,
        members,
        hparams,
        settings.explorer,
        cohort.hp_config,
        rng,
        round=round,
        next_id=cohort.next_member,
    )


def recorded_parents(record: RoundRecord, previous: Sequence[Member]) -> tuple[Slot, ...]:
    """Return the slot that the weights of each agent of the next round come from, as recorded.

    Args:
        record: A finished round.
        previous: The members that played it.

    Returns:
        One slot per member of `record.members`: its own for a survivor.
    """
    slots: dict[int | None, Slot] = {member.id: member.agent for member in previous}
    return tuple(
        slots.get(member.id, slots.get(member.parent, member.agent)) for member in record.members
    )
