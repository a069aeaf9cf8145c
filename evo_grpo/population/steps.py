"""The steps of a round: every agent generates, is rewarded and learns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from evo_grpo.envs.protocol import Environment, StartT
from evo_grpo.learn.objective.advantages import group_advantages
from evo_grpo.learn.rows import AgentBatch, rows_from_trajectories
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.sampler import PopulationSampler
from evo_grpo.population.evaluate import weighted
from evo_grpo.population.rules import RoundSettings
from evo_grpo.population.stats import Stopwatch, Tally, reward_metrics
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord, SavedAgent
from evo_grpo.types import Score, Slot


class Limit(Protocol):
    """What ends training before all rounds are played."""

    def spent(self, tallies: Sequence[Tally]) -> bool:
        """Say after a step, from the round's tallies so far, whether it was the last step."""
        ...

    def reached(self, scores: Sequence[Score | None]) -> bool:
        """Say after an evaluation whether the round was the last."""
        ...


class RunWriter:
    """Where a round is written: of this class nowhere, for rounds that stay in memory.

    Of a run with a folder it is `evo_grpo.training.writer.FolderWriter`, which appends to the log
    that trackers read. The observer beside it is the screen or the user's own.

    A context manager, which on exit waits for what is being written.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def step(self, round: int, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write what a step measured, a row per agent, so that others can read it during the round.

        Steps are 0-based in their round; step 0 begins the round anew. Rows are not changed
        afterwards.
        """

    def checkpoint(self, cohort: Cohort, round: int, slot: Slot) -> SavedAgent:
        """Save an agent as it was evaluated; return where, and the digests of its files."""
        del cohort, round, slot
        return SavedAgent()

    def commit(self, record: RoundRecord, completions: Sequence[Mapping[str, Any]]) -> None:
        """Write a finished round wholly or not at all, with a row per sample completion."""

    def amend(self, record: RoundRecord) -> None:
        """Write what a person asked for once its round had been written."""


def train(  # noqa: PLR0913 -- a round meets all parts of a run
    cohort: Cohort,
    env: Environment[Any],
    settings: RoundSettings,
    slots: Sequence[Slot],
    round: int,
    *,
    watch: Stopwatch,
    writer: RunWriter,
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
            observer.stage(round, "learn", step, settings.population.steps_per_round)
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
            _tell(settings, writer, observer, round, [step] if at_once else [], tallies)
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
        _tell(settings, writer, observer, round, [] if at_once else part, tallies)
        starts += sum(max(counts[step]) for step in part)
        if limit is not None and limit.spent(list(tallies.values())):
            break
    return list(tallies.values()), starts


def _tell(
    settings: RoundSettings,
    writer: RunWriter,
    observer: Observer,
    round: int,
    steps: Sequence[int],
    tallies: Mapping[Slot, Tally],
) -> None:
    """Hand finished steps to the writer and the observer."""
    for step in steps:
        metrics = {slot: tally.metrics[step] for slot, tally in tallies.items()}
        if settings.record.metrics:
            where = {"round": round, "step": step}
            rows = [{**where, "agent": slot, **values} for slot, values in metrics.items()]
            writer.step(round, step, rows)
        observer.step_done(round, step, metrics)


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

    One generation call per turn, one scoring, one fused forward and backward. `prompts` are P
    starts, one list for all agents: prompts, or seeds of episodes. Agent i takes the first P_i in
    [1, P] of them by `prompts_per_agent`, all where that is None. Agents are in the order of
    `tallies`, which get metrics, token counts and sample completions; `watch` gets the seconds of
    generate, reward and learn. An environment's own time counts as reward.
    """
    counts = prompts_per_agent or [len(prompts)] * len(slots)
    starts = [prompts[:count] for count in counts]
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
    batches: list[AgentBatch] = []
    for slot, experience, size in zip(slots, experiences, sampler.group_sizes, strict=True):
        scale = cohort.settings.algorithm.adv_scale
        values = group_advantages(experience.rewards, size, scale=scale, weights=env.weights)
        batches.append(AgentBatch(slot, rows_from_trajectories(experience.trajectories, values)))
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
    """Return `count` training starts from the first on, in the sequence that all batches cut.

    Batch `k` of size `n` of an environment begins at start `k * n`.
    """
    size = math.gcd(first, count)
    steps = range(first // size, (first + count) // size)
    return [start for step in steps for start in env.batch(step, size)]
