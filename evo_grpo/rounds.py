"""One round: every agent trains, all are evaluated, the better ones are copied over the worse, and it is written down.

Read `play_round` top to bottom; each stage is one call.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.errors import RunFailedError
from evo_grpo.evaluate import Evaluation, evaluate, weighted
from evo_grpo.evolve.generation import Generation, next_generation
from evo_grpo.evolve.mutate import Mutations
from evo_grpo.evolve.select import Selector
from evo_grpo.grpo.advantages import group_advantages
from evo_grpo.grpo.batch import AgentBatch, rows_from_groups
from evo_grpo.grpo.cohort import Cohort
from evo_grpo.record.observer import Observer
from evo_grpo.records import AgentRecord, Member, RoundRecord, Score
from evo_grpo.samples import Group, Prompt
from evo_grpo.seeding import derive, generator


@dataclass(frozen=True)
class Schedule:
    """How a population trains and evolves.

    Attributes:
        rounds: Rounds in all.
        steps_per_round: GRPO steps of every agent per round.
        prompts_per_step: P, the same prompts for every agent.
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


class Keeper(Protocol):
    """Where a round is written: a run folder, or nowhere."""

    def checkpoint(
        self, cohort: Cohort, round: int, agent: int, slot: int
    ) -> tuple[str | None, str | None]:
        """Save an agent as it was evaluated; return its relative path and digest."""
        ...

    def commit(self, record: RoundRecord, completions: Sequence[Mapping[str, Any]]) -> None:
        """Write a finished round: wholly, or not at all."""
        ...


@dataclass
class Tally:
    """What one agent did during a round's training steps."""

    metrics: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])
    tokens: int = 0
    samples: list[tuple[Group, np.ndarray]] = field(default_factory=list[tuple[Group, np.ndarray]])

    @property
    def failed(self) -> str:
        """Why the agent cannot be ranked, or an empty text."""
        broken = sum(m["failed"] for m in self.metrics)
        return f"the gradient of {int(broken)} step(s) was not finite" if broken else ""

    def means(self) -> dict[str, float]:
        """Return the round's means over steps; `ratio_max` is a maximum, counts are sums."""
        names = {name for m in self.metrics for name in m}
        out: dict[str, float] = {}
        for name in sorted(names):
            values = [m[name] for m in self.metrics if name in m]
            reduce = max if name == "ratio_max" else sum
            out[name] = float(reduce(values))
            if name not in ("ratio_max", "rows", "skipped_rows", "updates", "failed"):
                out[name] /= len(values)
        return out


class Stopwatch:
    """Wall seconds per phase of a round."""

    def __init__(self) -> None:
        """Start at zero."""
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Add the time spent inside to a phase."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def train_step(
    cohort: Cohort,
    env: ReasoningGym,
    slots: Sequence[int],
    prompts: Sequence[Prompt],
    *,
    stream: Sequence[str | int],
    watch: Stopwatch,
    tallies: Sequence[Tally],
) -> None:
    """Take one GRPO step with every agent: one generation call, one scoring, one fused forward and backward.

    Args:
        cohort: The agents.
        env: Scores completions.
        slots: Which agents, in the order of `tallies`.
        prompts: P prompts, the same for all agents.
        stream: Path of the step's random streams.
        watch: Gets the seconds of generate, reward and learn.
        tallies: Get metrics, token counts and sample completions.
    """
    with watch.phase("generate"):
        groups = cohort.generate(slots, prompts, stream=("sample", *stream))
    with watch.phase("reward"):
        matrix = env.score([group for mine in groups for group in mine])
        ends = np.cumsum([sum(len(g.completions) for g in mine) for mine in groups])[:-1]
        rewards = np.split(matrix, ends)
        batches = [
            AgentBatch(slot, rows_from_groups(mine, _advantages(cohort, mine, scores, env.weights)))
            for slot, mine, scores in zip(slots, groups, rewards, strict=True)
        ]
    with watch.phase("learn"):
        metrics = cohort.learn(batches, stream=("learn", *stream))
    for tally, mine, scores, values in zip(tallies, groups, rewards, metrics, strict=True):
        totals = weighted(scores, env.weights)
        tally.metrics.append({**values, **_reward_metrics(mine, totals)})
        tally.tokens += sum(len(c.token_ids) for g in mine for c in g.completions)
        tally.samples = [(mine[0], totals[: len(mine[0].completions)])]


def play_round(  # noqa: PLR0913 -- the parts a round is made of
    cohort: Cohort,
    env: ReasoningGym,
    schedule: Schedule,
    slots: Sequence[int],
    round: int,
    *,
    keeper: Keeper,
    observer: Observer,
) -> RoundRecord:
    """Train, evaluate, keep, select and mutate.

    Args:
        cohort: The agents.
        env: Prompts and rewards.
        schedule: How.
        slots: The population; `agent` in records is the position in this list.
        round: 0-based.
        keeper: Where it is written.
        observer: Told about progress.

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
    observer.stage(round, "evaluate", 0, 1)
    with watch.phase("evaluate"):
        scores = _fitness(cohort, env, schedule, slots, round, tallies)
    with watch.phase("checkpoint"):
        kept = [keeper.checkpoint(cohort, round, agent, slot) for agent, slot in enumerate(slots)]
    with watch.phase("evolve"):
        generation = _evolve(cohort, schedule, slots, round, scores)
    record = _record(
        cohort, slots, round, tallies, scores, kept, generation, watch, time.perf_counter() - start
    )
    keeper.commit(record, _completion_rows(round, tallies, schedule.completions))
    # The round is on disk before a slot is overwritten: a crash in between is mended by `apply` on
    # resume.
    apply(cohort, slots, generation, inherit_optimizer=schedule.inherit_optimizer)
    observer.round_done(record)
    return record


def apply(
    cohort: Cohort, slots: Sequence[int], generation: Generation, *, inherit_optimizer: bool
) -> None:
    """Make the cohort the next generation: copy parents over children, then set what each trains with.

    A plan never copies from a slot that it overwrites, so the order does not matter.
    """
    for agent, parent in enumerate(generation.parents):
        if parent != agent:
            cohort.copy(slots[parent], slots[agent], inherit_optimizer=inherit_optimizer)
    for agent, slot in enumerate(slots):
        cohort.set_hparams(slot, generation.hparams[agent])
        cohort.set_member(slot, generation.members[agent])


def _advantages(
    cohort: Cohort, groups: Sequence[Group], rewards: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    size = len(groups[0].completions)
    return group_advantages(rewards, size, scale=cohort.options.adv_scale, weights=weights)


def _reward_metrics(groups: Sequence[Group], totals: np.ndarray) -> dict[str, float]:
    table = totals.reshape(len(groups), -1)
    known = np.isfinite(table)
    spread = [len(set(row[k].tolist())) > 1 for row, k in zip(table, known, strict=True)]
    lengths = [len(c.token_ids) for g in groups for c in g.completions]
    ended = [c.ended for g in groups for c in g.completions]
    return {
        "reward": float(table[known].mean()) if known.any() else float("nan"),
        "zero_variance": 1.0 - float(np.mean(spread)),
        "completion_length": float(np.mean(lengths)),
        "ended": float(np.mean(ended)),
    }


def _fitness(  # noqa: PLR0913 -- one stage of play_round
    cohort: Cohort,
    env: ReasoningGym,
    schedule: Schedule,
    slots: Sequence[int],
    round: int,
    tallies: Sequence[Tally],
) -> list[Score | None]:
    """Score every agent that can be ranked; None for one whose update or evaluation was not finite."""
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
            f"round {round}: no agent has a finite update and fitness, so none can be a parent; lower the upper bound of "
            "lr or the clipping norm, and look at completions/ for what was sampled"
        )
    return scores


def _evolve(
    cohort: Cohort,
    schedule: Schedule,
    slots: Sequence[int],
    round: int,
    scores: Sequence[Score | None],
) -> Generation:
    states = [cohort.agents[slot] for slot in slots]
    members = tuple(s.member for s in states)
    hparams = tuple(s.hparams for s in states)
    if round + 1 >= schedule.rounds:
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


def _record(  # noqa: PLR0913 -- one stage of play_round
    cohort: Cohort,
    slots: Sequence[int],
    round: int,
    tallies: Sequence[Tally],
    scores: Sequence[Score | None],
    kept: Sequence[tuple[str | None, str | None]],
    generation: Generation,
    watch: Stopwatch,
    seconds: float,
) -> RoundRecord:
    total = max(1, sum(t.tokens for t in tallies))
    agents: list[AgentRecord] = []
    for agent, (slot, tally, score, (path, digest)) in enumerate(
        zip(slots, tallies, scores, kept, strict=True)
    ):
        state = cohort.agents[slot]
        agents.append(
            AgentRecord(
                agent=agent,
                member=state.member.id,
                parent=state.member.parent,
                round=round,
                state="failed" if score is None else "ok",
                hparams=state.hparams,
                score=score,
                metrics=tally.means(),
                tokens=tally.tokens,
                wall_seconds=seconds * tally.tokens / total,
                checkpoint=path,
                adapter_sha256=digest,
                mutation=state.member.mutation,
                seed=derive(cohort.seed, "sample", round, 0, slot),
                reason=tally.failed
                or ("" if score is not None else "the evaluation had no finite reward"),
            )
        )
    return RoundRecord(
        round, tuple(agents), dict(watch.seconds), generation.members, generation.hparams
    )


def _completion_rows(round: int, tallies: Sequence[Tally], count: int) -> list[dict[str, Any]]:
    return [
        {
            "round": round,
            "agent": agent,
            "prompt": group.prompt.text,
            "completion": completion.text,
            "reward": float(reward),
            "tokens": len(completion.token_ids),
            "ended": completion.ended,
        }
        for agent, tally in enumerate(tallies)
        for group, rewards in tally.samples
        for completion, reward in list(zip(group.completions, rewards, strict=True))[:count]
    ]


def members_from(record: RoundRecord, previous: Sequence[Member]) -> tuple[int, ...]:
    """Return the slot each agent of the next round is copied from, as recorded: its own for survivors.

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
