"""What a round asks of an environment, whether it has one turn or many, and what it gets back.

An environment is asked and told. `Environment.begin` opens a `Play` for all agents; the play says
what it wants sampled (`ask`), the caller samples it for the whole population in one call and hands
the completions back (`tell`), until the play asks for nothing more. A single turn asks once,
episodes ask once a turn. What comes before (starts) and after (advantages, rows, fitness) is the
same for both:

    play = env.begin(starts, group_sizes)
    while (ask := play.ask()) is not None:
        play.tell(sampler.sample(ask))
    experiences = play.experiences()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from evo_grpo.types import CompletionGroup, Prompt, Trajectory

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Experience:
    """What one agent did in a play, and what it earned.

    Attributes:
        trajectories: B = P * G of them, in the order of the starts, then of the group.
        rewards: (B, K) float64, one column per reward function; NaN where a function abstains, and
            in the rows of dropped episodes.
        metrics: What the environment counts besides, by name.
    """

    trajectories: tuple[Trajectory, ...]
    rewards: Floats
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def completions(self) -> int:
        """Completions sampled: what AgileRL counts as environment steps."""
        return sum(t.turns for t in self.trajectories)

    @property
    def tokens(self) -> int:
        """Tokens sampled."""
        return sum(t.sampled for t in self.trajectories)


@dataclass(frozen=True)
class Ask:
    """What a play wants sampled next, for all N agents at once.

    Attributes:
        prompts: N sequences of prompts; an empty one skips the agent, which then costs nothing.
        samples: N numbers of completions per prompt, each >= 1.
        turn: Turn of the episodes, 0-based; every turn has draws of its own. None where there is
            only one turn.
        keys: N sequences with one number per prompt, which stands for its position in the draws:
            an episode's draws do not depend on which other episodes still run. None numbers the
            prompts 0, 1, ....
    """

    prompts: Sequence[Sequence[Prompt]]
    samples: Sequence[int]
    turn: int | None = None
    keys: Sequence[Sequence[int]] | None = None


class Play(Protocol):
    """One pass of N agents through an environment, from their starts to their rewards."""

    def ask(self) -> Ask | None:
        """Return what to sample now, or None when the play is over; changes nothing."""
        ...

    def tell(self, groups: Sequence[Sequence[CompletionGroup]]) -> None:
        """Take what was sampled for the last `ask`.

        Args:
            groups: Per agent one group for each of its prompts, in their order.
        """
        ...

    def experiences(self) -> list[Experience]:
        """Score what was played, once it is over: one experience per agent.

        Raises:
            RewardError: A reward function failed.
            RunFailedError: The environment no longer gives anything to learn from.
        """
        ...


StartT = TypeVar("StartT")


class Environment(Protocol[StartT]):
    """What a population trains in: `ReasoningGym` and `MultiTurnGym` are two.

    A start is what all agents begin from alike: a prompt, or the seed of an episode.

    Attributes:
        tokenizer: Of the base model.
        max_output_tokens: Tokens that hold a usual completion; None leaves it to the algorithm.
        batch_size: P, starts of a step.
    """

    tokenizer: Any
    max_output_tokens: int | None
    batch_size: int

    @property
    def name(self) -> str:
        """Name in messages and records."""
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

    def begin(self, starts: Sequence[Sequence[StartT]], group_sizes: Sequence[int]) -> Play:
        """Begin a play of N agents.

        Args:
            starts: Per agent its own starts: the first P_i of one list that all share.
            group_sizes: Per agent G, how often it plays from each start.
        """
        ...

    def limit_context(self, max_context_length: int) -> None:
        """Set the model's context in tokens, and refuse prompts that leave no room in it."""
        ...
