"""MultiTurnGym: many episodes side by side, for a population to train in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evo_grpo.envs.episodes.failures import FailureStreak
from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv, TokenObservationWrapper
from evo_grpo.envs.episodes.play import EpisodePlay
from evo_grpo.envs.prompts import Messages
from evo_grpo.envs.protocol import Floats
from evo_grpo.envs.task import Split
from evo_grpo.errors import ConfigError
from evo_grpo.printable import raised
from evo_grpo.seeding import derive
from evo_grpo.settings.env import RewardCalls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # for annotations only: it loads torch

Made = MultiTurnEnv | TokenObservationWrapper
#: Environments keep seeds in 32 bits, some of them signed.
_SEEDS = 2**31


class MultiTurnGym:
    """An environment of many turns: seeds of episodes, turns, a cumulative reward.

    Nothing of an episode stays in it but the environments themselves, which are reset for the next,
    and how many seeds in a row gave only dropped episodes.

    Args:
        env_factory: Makes a new environment at each call: a `MultiTurnEnv`, or a
            `TokenObservationWrapper` around one.
        tokenizer: The base model's; None takes the wrapper's.
        max_turns: Completions after which an episode is over, at most the wrapper's; None takes
            the wrapper's.
        batch_size: P, episode seeds per step; each agent plays a group of episodes of each.
        seed: Seed of the order of episode seeds.
        max_output_tokens: Tokens of one completion; None takes the wrapper's.
        max_model_len: Tokens of an episode; None takes the wrapper's, and the model's context.
        apply_chat_template: As for `TokenObservationWrapper`, around a bare environment.
        conversation_template: As for `TokenObservationWrapper`, around a bare environment.
        max_environments: Environments at once, None for as many as there are episodes of a step;
            more episodes than that are played in several waves.
        evaluation_size: Episode seeds of a split when no number is asked for.
        name: Name in messages and records; None takes the environment's class.
        reward_timeout: Seconds that a reset or a step may take; None is no limit.

    Raises:
        ConfigError: The factory fails or makes something else, or a setting is missing.
    """

    def __init__(  # noqa: PLR0913 -- all but the first have defaults
        self,
        env_factory: Callable[[], Made],
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        max_turns: int | None = None,
        batch_size: int = 4,
        seed: int = 0,
        max_output_tokens: int | None = None,
        max_model_len: int | None = None,
        apply_chat_template: bool = True,
        conversation_template: str | Messages | None = None,
        max_environments: int | None = None,
        evaluation_size: int = 32,
        name: str | None = None,
        reward_timeout: float | None = RewardCalls().reward_timeout,
    ) -> None:
        self.reward_timeout = RewardCalls(reward_timeout=reward_timeout).reward_timeout
        for label, value in (
            ("max_turns", max_turns),
            ("batch_size", batch_size),
            ("max_environments", max_environments),
            ("evaluation_size", evaluation_size),
        ):
            if value is not None and (isinstance(value, bool) or not value >= 1):
                raise ConfigError(f"{label}: expected an integer >= 1, got {value!r}")
        if not callable(env_factory):
            raise ConfigError(
                "env_factory: expected a function that makes a new environment at each call, got "
                f"{type(env_factory).__name__}"
            )
        self._factory = env_factory
        self._max_turns = max_turns
        self._max_model_len = max_model_len
        self._apply_chat_template = apply_chat_template
        self._conversation_template = conversation_template
        self._max_environments = max_environments
        self._evaluation_size = evaluation_size
        self._context: int | None = None
        self._renews = True
        self._failures = FailureStreak()
        self.batch_size = batch_size
        self.seed = seed
        self.tokenizer: Any = tokenizer
        self.max_output_tokens = max_output_tokens
        first = self._make()
        self.tokenizer = first.tokenizer
        self.max_output_tokens = first.max_output_tokens
        self.max_turns = first.max_turns
        self.name = name or first.name
        self._idle = [first]

    @classmethod
    def of(cls, episode: TokenObservationWrapper) -> MultiTurnGym:
        """Play in one wrapper, one episode after the other."""
        gym = cls(lambda: episode, max_environments=1)
        gym._renews = False
        return gym

    @property
    def weights(self) -> Floats:
        """(1,): the cumulative reward is the only one."""
        return np.ones(1)

    def batch(self, step: int, size: int | None = None) -> list[int]:
        """Return the episode seeds of a step, the same at every call.

        Args:
            step: Number of the step, >= 0.
            size: Seeds, >= 1; None takes `batch_size`.
        """
        size = self.batch_size if size is None else size
        if step < 0 or size < 1:
            raise ConfigError(
                f"batch: expected step >= 0 and size >= 1, got step {step}, size {size}"
            )
        return self._seeds("train", step * size, size)

    def prompts(self, split: Split, size: int | None = None) -> list[int]:
        """Return the fixed episode seeds of a split; a smaller number of them begins a larger one.

        Args:
            split: "train", "validation" or "test"; each has seeds of its own.
            size: Seeds, >= 1; None takes `evaluation_size`.
        """
        return self._seeds(split, 0, self._evaluation_size if size is None else size)

    def limit_context(self, max_context_length: int) -> None:
        """End episodes where the model's context does."""
        self._context = max_context_length
        for episode in self._idle:
            episode.limit_context(max_context_length)

    def begin(self, starts: Sequence[Sequence[int]], group_sizes: Sequence[int]) -> EpisodePlay:
        """Begin a group of episodes of each seed for every agent; see `Environment`.

        Args:
            starts: Per agent its episode seeds.
            group_sizes: Per agent G.

        Raises:
            ConfigError: The factory fails.
        """
        return EpisodePlay(
            self,
            starts,
            group_sizes,
            max_environments=self._max_environments,
            failures=self._failures,
            timeout=self.reward_timeout,
        )

    def take(self) -> TokenObservationWrapper:
        """Return an environment for one episode: an idle one, or a new one.

        Raises:
            ConfigError: The factory fails.
        """
        return self._idle.pop() if self._idle else self._make()

    def give_back(self, episode: TokenObservationWrapper) -> None:
        """Keep an environment for the next episode, unless it raised in this one."""
        # The state of an environment that raised is unknown.
        if episode.error and self._renews:
            episode.close()
        else:
            self._idle.append(episode)

    def close(self) -> None:
        """Free the environments that are kept for the next episodes."""
        for episode in self._idle:
            episode.close()
        self._idle = []

    def _make(self) -> TokenObservationWrapper:
        try:
            made: object = self._factory()
        except Exception as error:  # the user's code may raise anything
            raise ConfigError(
                f"env_factory: it raised {raised(error)}; expected an environment"
            ) from error
        if not isinstance(made, TokenObservationWrapper):
            made = self._wrapped(made)
        if self._max_turns is not None:
            made.max_turns = min(made.max_turns, self._max_turns)
        if self._max_model_len is not None:
            made.limit_context(self._max_model_len)
        if self._context is not None:
            made.limit_context(self._context)
        return made

    def _wrapped(self, made: object) -> TokenObservationWrapper:
        if not isinstance(made, MultiTurnEnv):
            raise ConfigError(
                "env_factory: expected an environment with reset(seed) and step(action), or a "
                f"TokenObservationWrapper around one, got {type(made).__name__}"
            )
        if self.tokenizer is None or self._max_turns is None:
            raise ConfigError(
                f"env_factory: {type(made).__name__} is a bare environment; pass tokenizer= and "
                "max_turns= too, or return a TokenObservationWrapper around it"
            )
        return TokenObservationWrapper(
            made,
            self.tokenizer,
            self._max_turns,
            max_output_tokens=self.max_output_tokens,
            apply_chat_template=self._apply_chat_template,
            conversation_template=self._conversation_template,
        )

    def _seeds(self, split: Split, first: int, count: int) -> list[int]:
        return [
            derive(self.seed, "episodes", split, number) % _SEEDS
            for number in range(first, first + count)
        ]
