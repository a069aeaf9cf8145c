"""Runs the rollouts of a step; with dynamic sampling, replaces groups of equal rewards.

The dynamic sampling is that of DAPO (arXiv:2503.14476). All agents take their prompts from one
sequence. To replace groups of equal rewards, called dead groups, an agent takes further prompts
from the sequence until all are replaced or its tokens are spent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from evo_grpo.envs.protocol import (
    Ask,
    Environment,
    Experience,
    Floats,
    StartT,
    starts_under,
)
from evo_grpo.envs.rewards.weights import weights_of
from evo_grpo.learn.objective import shaping
from evo_grpo.learn.objective.advantages import zero_variance_groups
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.sampler import PopulationSampler
from evo_grpo.population.stats import Stopwatch
from evo_grpo.population.turns import Turns, played
from evo_grpo.record.vocabulary import over_steps
from evo_grpo.types import CompletionGroup, Slot


@dataclass(frozen=True)
class Rollout:
    """The rollout of one agent in a step.

    `sampled` has the rewards of the environment; `shaped` may have a column of penalties too.
    `learned` has the groups to learn from: the groups of `shaped`, of which dynamic sampling may
    have replaced some. `weights` (K,) are the weights of the rewards in `shaped` and `learned`.
    `starts` is the number of starts that the agent has used of the sequence of all agents.
    """

    sampled: Experience
    shaped: Experience
    learned: Experience
    weights: Floats
    starts: int


def play_step(
    cohort: Cohort,
    env: Environment[StartT],
    slots: Sequence[Slot],
    starts: Sequence[Sequence[StartT]],
    *,
    first: int,
    stream: Sequence[str | int],
    watch: Stopwatch,
) -> Turns[list[Rollout]]:
    """Sample and score the completions of several agents for one step.

    There is one generation call per turn; with `dynamic_sampling_tokens`, further calls replace
    groups whose rewards are all equal. `starts` has, for agent i, the first P_i entries of one
    list, which begins at start `first` of the environment's sequence. `watch` receives the seconds
    of the phases "generate" and "reward".
    """
    experiences = yield from _played(cohort, env, slots, starts, stream=stream, watch=watch)
    counts = [len(agent_starts) for agent_starts in starts]
    weights = [weights_of(env, cohort.agents[slot].hparams.reward_weights) for slot in slots]
    limits = [cohort.output_tokens(cohort.agents[slot].hparams) for slot in slots]
    per_agent = zip(experiences, weights, limits, counts, strict=True)
    rollouts = [_rollout(cohort, *arguments) for arguments in per_agent]
    budget = cohort.settings.algorithm.dynamic_sampling_tokens
    if budget is None:
        return rollouts
    turns = getattr(env, "max_turns", 1)  # an episode has several completions
    agents = [
        _DynamicBatch(rollout, cohort.agents[slot].hparams.group_size, longest * turns, budget)
        for slot, rollout, longest in zip(slots, rollouts, limits, strict=True)
    ]
    wave = 0
    while asking := [number for number, agent in enumerate(agents) if agent.groups_needed()]:
        wave += 1
        further = [
            starts_from(env, first + agents[number].starts, agents[number].groups_needed())
            for number in asking
        ]
        resampling = [slots[number] for number in asking]
        path = (*stream, "wave", wave)
        experiences = yield from _played(cohort, env, resampling, further, stream=path, watch=watch)
        for number, experience, agent_starts in zip(asking, experiences, further, strict=True):
            rollout = _rollout(
                cohort, experience, weights[number], limits[number], len(agent_starts)
            )
            agents[number].add(rollout)
    return [agent.rollout() for agent in agents]


def starts_from(env: Environment[StartT], first: int, count: int) -> list[StartT]:
    """Return training starts `first` to `first + count - 1` of the sequence of an environment."""
    size = math.gcd(first, count)
    steps = range(first // size, (first + count) // size)
    return [start for step in steps for start in env.batch(step, size)]


@dataclass
class _DynamicBatch:
    """The groups of an agent's batch, in which dead groups are to be replaced.

    `begun` is the rollout of the first prompts, `size` is G, `longest` is the maximum number of
    tokens of a completion or episode, and `tokens` is the number that may still be sampled.
    `places` has the groups, `dead` the positions of dead groups; `filled` counts replaced groups.
    """

    begun: Rollout
    size: int
    longest: int
    tokens: int
    further: list[Rollout] = field(default_factory=list[Rollout])
    places: list[Experience] = field(init=False)
    dead: list[int] = field(init=False)
    filled: int = 0

    def __post_init__(self) -> None:
        self.places = _groups(self.begun.shaped, self.size)
        self.dead = np.flatnonzero(self._is_dead(self.begun)).tolist()

    @property
    def starts(self) -> int:
        """Number of starts that the agent has used in this step."""
        return self.begun.starts + sum(rollout.starts for rollout in self.further)

    def groups_needed(self) -> int:
        """Return the number of groups to sample: one per dead group, as far as tokens suffice."""
        return min(len(self.dead), self.tokens // (self.size * self.longest))

    def add(self, rollout: Rollout) -> None:
        """Replace dead groups, in order, by those groups of a rollout that are not dead."""
        # An environment that drops all its episodes samples nothing, and would never end.
        self.tokens -= rollout.sampled.tokens or self.tokens
        self.further.append(rollout)
        groups = _groups(rollout.shaped, self.size)
        for group, is_dead in zip(groups, self._is_dead(rollout), strict=True):
            if not is_dead:
                self.places[self.dead.pop(0)] = group
                self.filled += 1

    def rollout(self) -> Rollout:
        """Return the rollout with all that was sampled, and the groups to learn from."""
        parts = [self.begun, *self.further]
        counted = {
            "resampled": float(sum(rollout.starts for rollout in self.further)),
            "replaced": float(self.filled),
        }
        shaped = joined([rollout.shaped for rollout in parts])
        return Rollout(
            sampled=joined([rollout.sampled for rollout in parts]),
            shaped=Experience(shaped.trajectories, shaped.rewards, {**shaped.metrics, **counted}),
            learned=joined(self.places),
            weights=self.begun.weights,
            starts=self.starts,
        )

    def _is_dead(self, rollout: Rollout) -> Any:  # noqa: ANN401 -- (groups,) numpy bool
        return zero_variance_groups(rollout.shaped.rewards, self.size, weights=rollout.weights)


def joined(parts: Sequence[Experience]) -> Experience:
    """Join the experiences of one agent, at least one, into one experience.

    Metrics become sums, maxima, or means over completions; see `record.vocabulary.over_steps`.
    """
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part.metrics):
        having = [part for part in parts if name in part.metrics]
        values = [part.metrics[name] for part in having]
        if (over := over_steps(name)) in ("sum", "max"):
            metrics[name] = sum(values) if over == "sum" else max(values)
        else:
            counts = [max(1, len(part.trajectories)) for part in having]
            metrics[name] = float(np.average(values, weights=counts))
    return Experience(
        tuple(trajectory for part in parts for trajectory in part.trajectories),
        np.concatenate([part.rewards for part in parts]),
        metrics,
    )


def _groups(experience: Experience, size: int) -> list[Experience]:
    offsets = range(0, len(experience.trajectories), size)
    return [
        Experience(
            experience.trajectories[offset : offset + size],
            experience.rewards[offset : offset + size],
        )
        for offset in offsets
    ]


def _played(
    cohort: Cohort,
    env: Environment[StartT],
    slots: Sequence[Slot],
    starts: Sequence[Sequence[StartT]],
    *,
    stream: Sequence[str | int],
    watch: Stopwatch,
) -> Turns[list[Experience]]:
    """Play each agent's starts to the end; the wait for environments counts as reward time."""
    sampler = PopulationSampler.in_training(cohort, slots, stream=("sample", *stream))
    reward = partial(watch.phase, "reward")
    with reward():
        prompted = [
            starts_under(env, cohort.agents[slot].hparams.prompt, agent_starts)
            for slot, agent_starts in zip(slots, starts, strict=True)
        ]

    def sample(ask: Ask) -> list[list[CompletionGroup]]:
        with watch.phase("generate"):
            return sampler.sample(ask)

    begin = partial(cohort.begin, env, prompted, sampler.group_sizes)
    return (yield from played(env, begin, sample, reward))


def _rollout(
    cohort: Cohort, experience: Experience, weights: Floats, longest: int, starts: int
) -> Rollout:
    """Return a rollout with the environment's rewards and, if enabled, the overlong penalty.

    `weights` (K,) are the agent's reward weights, `longest` is the agent's limit of tokens for a
    completion.
    """
    algorithm = cohort.settings.algorithm
    if algorithm.overlong_buffer is None:
        return Rollout(experience, experience, experience, weights, starts)
    lengths = [shaping.longest_completion(trajectory) for trajectory in experience.trajectories]
    penalties = shaping.overlong_penalties(lengths, longest, algorithm.overlong_buffer)
    weight = algorithm.overlong_penalty
    shaped = shaping.with_overlong_penalty(experience, penalties, weight)
    return Rollout(experience, shaped, shaped, np.append(weights, weight), starts)
