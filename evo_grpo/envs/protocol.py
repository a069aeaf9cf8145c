"""What a round asks of an environment, whether it has one turn or many, and what it gets back.

An environment is handed the policies and plays: `Environment.play` is the one place where the
number of turns matters. Everything before it (starts) and after it (advantages, rows, fitness) is
the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from evo_grpo.types import Completion, Group, Prompt, Trajectory

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Experience:
    """What one policy brings back.

    Attributes:
        trajectories: B = P * G of them, in the order of the starts, then of the group.
        rewards: (B, K) float64, one column per reward function; NaN where one abstains, and where
            the trajectory was dropped.
        metrics: What the environment counts besides, by name.
    """

    trajectories: tuple[Trajectory, ...]
    rewards: Floats
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def completions(self) -> int:
        """Completions sampled: the environment steps of the reference API."""
        return sum(t.turns for t in self.trajectories)

    @property
    def tokens(self) -> int:
        """Tokens sampled."""
        return sum(t.sampled for t in self.trajectories)


class Sampler(Protocol):
    """Samples for N policies, in one generation call each time it is asked."""

    @property
    def sizes(self) -> Sequence[int]:
        """G of each policy: its completions, or episodes, of one start."""
        ...

    def groups(self, prompts: Sequence[Prompt]) -> list[list[Group]]:
        """Return, per policy, one group of G completions for each of the same prompts."""
        ...

    def turn(
        self,
        number: int,
        prompts: Sequence[Sequence[Prompt]],
        keys: Sequence[Sequence[int]],
    ) -> list[list[Completion]]:
        """Return one completion per prompt.

        Args:
            number: Turn of the episodes, 0-based; each turn has draws of its own.
            prompts: Per policy its own prompts, maybe none.
            keys: Per policy and prompt the number of the episode, so that its draws do not depend
                on which other episodes still run.
        """
        ...


StartT = TypeVar("StartT")


class Environment(Protocol[StartT]):
    """What a population trains in: `ReasoningGym` and `MultiTurnGym` are two.

    A start is what all agents begin from alike: a prompt, or the seed of an episode.
    """

    tokenizer: Any
    max_output_tokens: int | None
    batch_size: int

    @property
    def name(self) -> str:
        """How messages and records call it."""
        ...

    @property
    def weights(self) -> Floats:
        """(K,) factor of each reward function."""
        ...

    def batch(self, step: int, size: int | None = None) -> list[StartT]:
        """Return the starts of a training step, a pure function of the step."""
        ...

    def prompts(self, split: Any, size: int | None = None) -> list[StartT]:  # noqa: ANN401 -- a Split
        """Return the fixed starts of a split, the same at every call."""
        ...

    def play(self, sampler: Sampler, starts: Sequence[StartT]) -> list[Experience]:
        """Let every policy of the sampler go from every start, G times each."""
        ...

    def limit_context(self, max_context_length: int) -> None:
        """Set the model's context, and refuse what cannot fit it."""
        ...


def play_prompts(
    sampler: Sampler, prompts: Sequence[Prompt], score: Callable[[Sequence[Group]], Floats]
) -> list[Experience]:
    """Play the one turn of a single-turn environment.

    Args:
        sampler: The policies.
        prompts: P prompts, the same for all.
        score: (B, K) rewards of all groups at once.
    """
    groups = sampler.groups(prompts)
    rewards = score([group for mine in groups for group in mine])
    ends = np.cumsum([sum(len(g.completions) for g in mine) for mine in groups])[:-1]
    return [
        Experience(tuple(t for group in mine for t in _trajectories(group)), scores)
        for mine, scores in zip(groups, np.split(rewards, ends), strict=True)
    ]


def _trajectories(group: Group) -> list[Trajectory]:
    prompt = group.prompt
    return [
        Trajectory(
            prompt=prompt.text,
            text=completion.text,
            token_ids=prompt.token_ids + completion.token_ids,
            mask=(False,) * len(prompt.token_ids) + (True,) * len(completion.token_ids),
            logprobs=completion.logprobs,
            ended=completion.ended,
        )
        for completion in group.completions
    ]
