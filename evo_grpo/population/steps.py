"""Runs the steps of a round, in which every agent generates, is rewarded and learns."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from evo_grpo.envs.protocol import Environment, StartT
from evo_grpo.envs.rewards.weights import values_by_name, weights_of
from evo_grpo.learn.objective.advantages import group_advantages
from evo_grpo.learn.rows import AgentBatch, rows_from_trajectories
from evo_grpo.population.checkpoints.write import Snapshot
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.evaluate import weighted
from evo_grpo.population.rollouts import play_step, starts_from
from evo_grpo.population.rules import RoundSettings
from evo_grpo.population.stats import Stopwatch, Tally, reward_metrics
from evo_grpo.population.turns import Turns, alone, take_turns
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord
from evo_grpo.types import Score, Slot
from evo_grpo.working import working


class Limit(Protocol):
    """A rule that may end training before the last round; every rank must have all agents."""

    def spent(self, tallies: Sequence[Tally]) -> bool:
        """Return whether the latest step is the last, by the tallies of the round so far."""
        ...

    def ends_after(self, scores: Sequence[Score | None]) -> bool:
        """Return whether a round with these scores is the last; record that the round is over.

        Called on the first rank to plan the round, and on each rank to carry out its plan.
        """
        ...


@dataclass(frozen=True)
class CheckpointFiles:
    """The checkpoint files of a rank.

    `written` has the SHA-256 of each file by path in the run folder, `unwritten` the agents that
    the first rank has to write, by checkpoint path.
    """

    written: Mapping[str, str] = field(default_factory=dict[str, str])
    unwritten: Mapping[str, Snapshot] = field(default_factory=dict[str, Snapshot])


class RunWriter:
    """Writes rounds; this base class writes nothing, for rounds that stay in memory.

    `evo_grpo.training.writer.FolderWriter` writes into a run folder, whose log the trackers read. A
    writer is a context manager; on exit it waits until everything is written.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def step(self, round: int, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the metrics of a step, one row per agent, so that readers see them immediately.

        Step 0 discards earlier rows of the round. The rows must not change afterwards.
        """

    def checkpoint(self, cohort: Cohort, round: int, slot: Slot) -> str | None:
        """Save an agent after its evaluation; return the checkpoint's path, None without one.

        An agent that is evaluated again is saved again, with the same weights.
        """
        del cohort, round, slot
        return None

    def hand_over(self) -> CheckpointFiles:
        """Return the checkpoint files that this rank has saved since the last call."""
        return CheckpointFiles()

    def receive(self, files: Sequence[CheckpointFiles]) -> None:
        """Receive, on the first rank, the files that all ranks have handed over."""

    def commit(self, record: RoundRecord, completions: Sequence[Mapping[str, Any]]) -> None:
        """Write a finished round and its sample completions, a row each; on the first rank only.

        The write is atomic: the round is recorded completely or not at all.
        """

    def amend(self, record: RoundRecord) -> None:
        """Update the record of a written round with requests that came later."""

    def note(self, text: str) -> None:
        """Write, on the first rank, a sentence about an event that belongs to no round."""

    def round_over(self) -> None:
        """Drop copies of agents from memory; called on every rank after a round's `commit`."""


@dataclass(frozen=True)
class Training:
    """The training of round `number` (0-based).

    `limit` may end training early, `past` are the records of the known earlier rounds, and `watch`
    has the seconds of the round's phases.
    """

    cohort: Cohort
    env: Environment[Any]
    settings: RoundSettings
    slots: Sequence[Slot]
    number: int
    writer: RunWriter
    observer: Observer
    limit: Limit | None = None
    past: Sequence[RoundRecord] = ()
    watch: Stopwatch = field(default_factory=Stopwatch)


def train(this: Training) -> tuple[dict[Slot, Tally], int]:
    """Take the steps of a round with this rank's agents.

    Return the agents' tallies, and the number of starts that the run has used. With several ranks,
    the metrics of the steps are reported later, when the round is planned.
    """
    cohort, env, settings, slots = this.cohort, this.env, this.settings, this.slots
    limit, past = this.limit, this.past
    counts = settings.prompts_of([cohort.agents[slot].hparams.group_size for slot in slots])
    # All steps take their starts from one sequence without gaps.
    starts = past[-1].starts if past else this.number * sum(map(max, counts))
    tallies = {slot: Tally() for slot in slots if cohort.is_local(slot)}
    overlap = cohort.overlap.takes_turns(env)
    parts = cohort.parts_here(slots)
    resamples = cohort.settings.algorithm.dynamic_sampling_tokens is not None
    finished = Counter[int]()

    def steps_of(part: tuple[Slot, ...], steps: Sequence[int], first: int) -> Turns[int]:
        """Take consecutive steps with a part; return how many starts the last step has used."""
        used = 0
        for step in steps:
            if part is parts[0]:
                total = settings.population.steps_per_round
                this.observer.stage(this.number, "learn", step, total)
            prompts_of = dict(zip(slots, counts[step], strict=True))
            begins = not (past or step) and part is parts[0]
            with working("take the first step") if begins else nullcontext():
                used = yield from training(
                    cohort, env, part, starts_from(env, first, max(counts[step])),
                    stream=(this.number, step), watch=this.watch,
                    tallies=[tallies[slot] for slot in part],
                    prompts_per_agent=[prompts_of[slot] for slot in part],
                    first=first, minibatches=settings.minibatches(len(slots)),
                )  # fmt: skip
            first += max(counts[step])
            finished[step] += 1
            if finished[step] == len(parts) and len(tallies) == len(slots):
                report_steps(this, [step], tallies)
        return used

    # The number of starts that a step uses, and whether it is the last, may depend on all parts.
    together = limit is not None or resamples or not overlap
    numbers = range(len(counts))
    for steps in [[step] for step in numbers] if together else [numbers]:
        turns = [steps_of(part, steps, starts) for part in parts]
        used = [sum(max(counts[step]) for step in steps), *take_turns(turns, overlap=overlap)]
        if resamples:
            # All ranks begin the next step with the same prompt.
            used = cohort.team.agree(max(used), list)
        starts += max(used)
        if limit is not None and limit.spent(list(tallies.values())):
            break
    return tallies, starts


def report_steps(this: Training, steps: Sequence[int], tallies: Mapping[Slot, Tally]) -> None:
    """Pass the metrics of finished steps to the writer and the observer."""
    for step in steps:
        metrics = {slot: tally.metrics[step] for slot, tally in tallies.items()}
        if this.settings.record.metrics:
            where = {"round": this.number, "step": step}
            rows = [{**where, "agent": slot, **values} for slot, values in metrics.items()]
            this.writer.step(this.number, step, rows)
        this.observer.step_done(this.number, step, metrics)


def training(  # noqa: PLR0913 -- a step meets all parts of a run
    cohort: Cohort,
    env: Environment[StartT],
    slots: Sequence[Slot],
    prompts: Sequence[StartT],
    *,
    stream: Sequence[str | int],
    watch: Stopwatch,
    tallies: Sequence[Tally],
    prompts_per_agent: Sequence[int] | None = None,
    first: int = 0,
    minibatches: int = 1,
) -> Turns[int]:
    """Take one GRPO step with every agent; return the most starts that an agent has used.

    A step makes one generation call per turn, one scoring, and one fused forward and backward.
    `prompts` are the P starts of all agents, prompts or seeds of episodes, from start `first` of
    the environment's sequence. Agent i takes the first P_i of them, with P_i in [1, P] from
    `prompts_per_agent` (None for all P). With `dynamic_sampling_tokens`, agents also take later
    starts, to replace groups of equal rewards. Agents without a `batch_size` learn in `minibatches`
    optimizer steps. `tallies`, in the order of `slots`, receive metrics, counts and sample
    completions, and `watch` the seconds of each phase.
    """
    counts = prompts_per_agent or [len(prompts)] * len(slots)
    starts = [prompts[:count] for count in counts]
    rollouts = yield from play_step(
        cohort, env, slots, starts, first=first, stream=stream, watch=watch
    )
    agents = [cohort.agents[slot].hparams for slot in slots]
    sizes = [hparams.group_size for hparams in agents]
    algorithm = cohort.settings.algorithm
    batches: list[AgentBatch] = []
    for slot, rollout, hparams in zip(slots, rollouts, agents, strict=True):
        learned, scale = rollout.learned, algorithm.adv_scale(hparams)
        values = group_advantages(
            learned.rewards, hparams.group_size, scale=scale, weights=rollout.weights
        )
        rows = rows_from_trajectories(
            learned.trajectories, values, mask_truncated=algorithm.mask_truncated_completions
        )
        batches.append(AgentBatch(slot, rows, minibatches))
    with watch.phase("learn"):
        metrics = cohort.learn(batches, stream=("learn", *stream))
    for slot, tally, rollout, size, values in zip(
        slots, tallies, rollouts, sizes, metrics, strict=True
    ):
        experience = rollout.sampled
        state = cohort.agents[slot]
        totals = weighted(experience.rewards, weights_of(env, state.hparams.reward_weights))
        counted = reward_metrics(rollout.shaped, totals, size, rollout.weights)
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
        tally.rewards = values_by_name(env, experience.rewards[:size])
    return max(rollout.starts for rollout in rollouts)


#: `training`, run to its end: agents share each generation call and wait for their rewards.
train_step = alone(training)
