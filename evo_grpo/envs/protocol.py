"""The interface between a round and an environment of one or many turns.

As in Optuna, `ask` returns the prompts of the next turn, the caller samples completions for all
agents in one call, and `tell` takes them, until `ask` returns None. A play of single turns asks
once, a play of episodes once per turn:

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

from evo_grpo.errors import ConfigError
from evo_grpo.schema.problems import Problems
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.settings.env import prompt_problems
from evo_grpo.types import CompletionGroup, Prompt, Trajectory

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Experience:
    """The trajectories and rewards of one agent in a play.

    Attributes:
        trajectories: B = P * G trajectories, ordered by start, then within the group.
        rewards: (B, K) float64, one column per reward function; NaN if a function abstained, the
            group was set aside or the episode was dropped.
        metrics: Further metrics of the environment, by name.
    """

    trajectories: tuple[Trajectory, ...]
    rewards: Floats
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def completions(self) -> int:
        """Number of sampled completions, which AgileRL counts as environment steps."""
        return sum(t.turns for t in self.trajectories)

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(t.sampled for t in self.trajectories)


@dataclass(frozen=True)
class Ask:
    """The prompts of the next turn, for all N agents.

    Attributes:
        prompts: N sequences of prompts; an empty sequence skips its agent.
        samples: N numbers of completions per prompt, each >= 1.
        turn: Number of the turn, from 0, which selects the random draws; None for a single turn.
        keys: N sequences with a number per prompt, which selects the random draws of the prompt, so
            that they do not depend on which other episodes still run. None stands for 0, 1, ....
    """

    prompts: Sequence[Sequence[Prompt]]
    samples: Sequence[int]
    turn: int | None = None
    keys: Sequence[Sequence[int]] | None = None


def starts_under(
    env: Environment[StartT], prompt: str | None, starts: Sequence[StartT]
) -> Sequence[StartT]:
    """Render starts with the template `prompt` of `env.prompts`; None returns them unchanged."""
    if prompt is None:
        return starts
    under = getattr(env, "under", None)
    if under is None:
        raise ConfigError(
            f"prompt of an agent: expected an environment with prompts by name, env.prompts, got "
            f"{env.name!r}, which has one; leave evolve.hyperparameters.prompt out"
        )
    return under(prompt, starts)


def check_prompts(env: Environment[Any], space: HyperparameterConfig) -> None:
    """Check that an environment has every prompt that the hyperparameter `prompt` may name."""
    names: Sequence[str] = getattr(env, "prompt_names", ())
    if problems := list(prompt_problems(space, names)):
        raise Problems(*problems).below("evolve", "hyperparameters")


class Play(Protocol):
    """One pass of N agents through an environment, from their starts to their rewards."""

    def ask(self) -> Ask | None:
        """Return the prompts to sample from, or None at the end of the play; changes nothing."""
        ...

    def tell(self, groups: Sequence[Sequence[CompletionGroup]]) -> None:
        """Accept the completions of the last `ask`: for each agent one group per prompt."""
        ...

    def experiences(self) -> list[Experience]:
        """Score a finished play, and return one experience per agent.

        Raises:
            RewardError: A reward function failed.
            RunFailedError: All episodes of many successive seeds failed.
        """
        ...


StartT = TypeVar("StartT")


class Environment(Protocol[StartT]):
    """An environment of a population, such as `ReasoningGym` or `MultiTurnGym`.

    A start is a prompt, or the seed of an episode; all agents of a step share one list of starts.

    Attributes:
        tokenizer: The tokenizer of the base model.
        max_output_tokens: Tokens of a usual completion; None leaves it to the algorithm.
        batch_size: P, starts per step.
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
        """(K,) float64 weight of each reward function."""
        ...

    def batch(self, step: int, size: int | None = None) -> list[StartT]:
        """Return `size` (None: P) starts of a training step, the same at every call."""
        ...

    def prompts(self, split: Any, size: int | None = None) -> list[StartT]:  # noqa: ANN401 -- a Split
        """Return `size` starts of a split, the same at every call.

        If `size` is None, the environment decides how many.
        """
        ...

    def begin(self, starts: Sequence[Sequence[StartT]], group_sizes: Sequence[int]) -> Play:
        """Begin a play of N agents.

        Args:
            starts: For each agent its starts: the first ones of a list that all agents share.
            group_sizes: For each agent G, its number of completions, or episodes, from each start.
        """
        ...

    def limit_context(self, max_context_length: int) -> None:
        """Set the context length in tokens; refuse prompts that leave no room for a completion."""
        ...
