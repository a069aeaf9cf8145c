"""The steps of a round: every agent generates, is rewarded and learns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from evo_grpo.cohort.cohort import Cohort
from evo_grpo.cohort.sampler import PopulationSampler
from evo_grpo.envs.protocol import Environment, Experience, StartT
from evo_grpo.errors import ShapeError
from evo_grpo.evaluate import weighted
from evo_grpo.learner.rows import AgentBatch, rows_from_trajectories
from evo_grpo.objective.advantages import group_advantages
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord
from evo_grpo.round_stats import Stopwatch, Tally, reward_metrics
from evo_grpo.rules import RoundSettings
from evo_grpo.types import Score, Slot


class Limit(Protocol):
    """What ends training before all rounds are played."""

    def spent(self, tallies: Sequence[Tally]) -> bool:
        """Say after a step, from the round's tallies so far, whether it was the last step."""
        ...

    def reached(self, scores: Sequence[Score | None]) -> bool:
        """Say after an evaluation whether the round was the last."""
        ...


def train(  # noqa: PLR0913 -- a round meets all parts of a run
    cohort: Cohort,
    env: Environment[Any],
    settings: RoundSettings,
    slots: Sequence[Slot],
    round: int,
    *,
    watch: Stopwatch,
    observer: Observer,
    limit: Limit | None,
    past: Sequence[RoundRecord],
) -> tuple[list[Tally], int]:
    """Take the steps of a round with all agents, each rank with its own.

    Returns:
        What each agent did, and the starts that were handed out up to the end of the round.
    """
    tallies = {slot: Tally() for slot in slots}
    counts = settings.prompts_of([cohort.agents[slot].hparams.group_size for slot in slots])
    # Starts are handed out in one sequence, without gaps however many a step takes.
    starts = past[-1].starts if past else round * sum(map(max, counts))

    # Else what the agents of other ranks did is known once all have told of theirs.
    at_once = all(map(cohort.here, slots))

    def take(steps: Sequence[int], first: int) -> dict[Slot, tuple[Tally, int, int]]:
        for step in steps:
            observer.stage(round, "learn", step, settings.steps_per_round)
            of_agents = dict(zip(slots, counts[step], strict=True))
            prompts = starts_from(env, first, max(of_agents.values()))
            first += len(prompts)
            for shard in cohort.shards_here(slots):
                train_step(
                    cohort,
                    env,
                    shard,
                    prompts,
                    stream=(round, step),
                    watch=watch,
                    tallies=[tallies[slot] for slot in shard],
                    prompts_per_agent=[of_agents[slot] for slot in shard],
                )
            _tell(observer, round, [step] if at_once else [], tallies)
        here = [cohort.agents[slot] for slot in slots if cohort.here(slot)]
        return {state.slot: (tallies[state.slot], state.steps, state.dead_steps) for state in here}

    # One word between ranks for the whole round, or after every step where it may be the last.
    steps = range(len(counts))
    for part in [steps] if limit is None else [steps[step : step + 1] for step in steps]:
        given = starts
        for told in cohort.team.gather(lambda: take(part, given)):  # noqa: B023 -- called at once
            for slot, (tally, steps_taken, dead_steps) in told.items():
                if not cohort.here(slot):
                    state, tallies[slot] = cohort.agents[slot], tally
                    state.steps, state.dead_steps = steps_taken, dead_steps
        _tell(observer, round, [] if at_once else part, tallies)
        starts += sum(max(counts[step]) for step in part)
        if limit is not None and limit.spent(list(tallies.values())):
            break
    return list(tallies.values()), starts


def _tell(
    observer: Observer, round: int, steps: Sequence[int], tallies: Mapping[Slot, Tally]
) -> None:
    for step in steps:
        observer.step_done(round, step, {slot: t.metrics[step] for slot, t in tallies.items()})


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
        play = cohort.begin(env, starts, sampler.group_sizes)
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
        state = cohort.agents[slot]
        spent = {
            "lr": float(state.optimizer.param_groups[0]["lr"]),
            "tokens": float(experience.tokens),
            "completions": float(experience.completions),
        }
        tally.metrics.append({**values, **counted, **spent})
        state.dead_steps = state.dead_steps + 1 if counted["zero_variance"] == 1 else 0
        tally.tokens += experience.tokens
        tally.completions += experience.completions
        first_group = experience.trajectories[:size]
        tally.samples = list(zip(first_group, totals[:size].tolist(), strict=True))


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
