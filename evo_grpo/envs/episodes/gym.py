"""MultiTurnGym: many episodes at once, with one generation call per turn for a population."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, final
from weakref import WeakValueDictionary

import numpy as np

from evo_grpo.envs.data.tables import Split
from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv, TokenObservationWrapper
from evo_grpo.envs.messages import excerpt
from evo_grpo.envs.prompts import Messages, Tokenizer
from evo_grpo.envs.protocol import Ask, Experience, Floats
from evo_grpo.envs.rewards.watch import Call, Watch, watching
from evo_grpo.envs.template_keywords import ignored_keywords
from evo_grpo.errors import ConfigError, RewardAbortError, RunFailedError
from evo_grpo.escaping import error_text
from evo_grpo.seeding import derive
from evo_grpo.settings.env import RewardCalls
from evo_grpo.types import CompletionGroup, Trajectory

#: Consecutive episode seeds without a successful episode, after which the run ends.
MAX_FAILED_SEEDS = 16
EnvOrWrapper = MultiTurnEnv | TokenObservationWrapper
#: Environments keep seeds in 32 bits, some of them signed.
_SEEDS = 2**31


class MultiTurnGym:
    """An environment of many turns: seeds determine episodes, whose rewards add up over turns.

    Args:
        env_factory: Returns a new environment at each call: a `MultiTurnEnv`, or a
            `TokenObservationWrapper` around one.
        tokenizer: The tokenizer of the base model; None takes the wrapper's.
        max_turns: Completions after which an episode ends, at most the wrapper's; None takes the
            wrapper's.
        batch_size: P, episode seeds per step; each agent plays a group of episodes from each seed.
        seed: Seed from which the episode seeds are derived.
        max_output_tokens: Tokens of one completion; None takes the wrapper's.
        max_model_len: Tokens of an episode, at most the model's context; None takes the wrapper's
            limit, or else the context.
        apply_chat_template: As for `TokenObservationWrapper`, around a bare environment.
        conversation_template: As for `TokenObservationWrapper`.
        chat_template_kwargs: As for `TokenObservationWrapper`.
        max_environments: Maximum number of environments at once; the episodes of a step are then
            played in several waves. None makes one environment per episode.
        evaluation_size: Default number of episode seeds of a split.
        name: Name in messages and records; None takes the environment's class.
        reward_timeout: Seconds that a reset or a step may take; None is no limit.

    Raises:
        ConfigError: The factory fails or returns no environment, or a setting is missing.
    """

    def __init__(  # noqa: PLR0913 -- all but the first have defaults
        self,
        env_factory: Callable[[], EnvOrWrapper],
        tokenizer: Tokenizer | None = None,
        *,
        max_turns: int | None = None,
        batch_size: int = 4,
        seed: int = 0,
        max_output_tokens: int | None = None,
        max_model_len: int | None = None,
        apply_chat_template: bool = True,
        conversation_template: str | Messages | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_environments: int | None = None,
        evaluation_size: int = 32,
        name: str | None = None,
        reward_timeout: float | None = RewardCalls().reward_timeout,
    ) -> None:
        self.reward_timeout = RewardCalls(reward_timeout=reward_timeout).reward_timeout
        counts = {
            "max_turns": max_turns,
            "batch_size": batch_size,
            "max_environments": max_environments,
            "evaluation_size": evaluation_size,
        }
        for label, value in counts.items():
            if value is not None and (isinstance(value, bool) or not value >= 1):
                raise ConfigError(f"{label}: expected an integer >= 1, got {value!r}")
        self.factory = env_factory
        self._max_turns = max_turns
        self._max_model_len = max_model_len
        self._apply_chat_template = apply_chat_template
        self._conversation_template = conversation_template
        self._keywords = chat_template_kwargs or {}
        self.max_environments = max_environments
        self._evaluation_size = evaluation_size
        self._context = max_model_len
        self._renews = True
        self.plays = 1  # number that run at once and share `max_environments`
        self._failed_seeds = 0.0
        self.batch_size = batch_size
        self.seed = seed
        self.tokenizer: Any = tokenizer
        self.max_output_tokens = max_output_tokens
        episode = self._make()
        self.tokenizer = episode.tokenizer
        for sentence in ignored_keywords(self.tokenizer.chat_template, self._keywords):
            warnings.warn(sentence, UserWarning, stacklevel=2)
        self.max_output_tokens = episode.max_output_tokens
        self.max_turns = episode.max_turns
        self.name = name or episode.name
        self._idle = [episode]
        #: Running episodes, by the id() of their environments.
        self._lent = WeakValueDictionary[int, TokenObservationWrapper]()
        self._shared = Lock()  # for threads that play side by side
        # Held by the play that resets or steps; no time limit runs while a play waits for it.
        self.stepping = Lock() if getattr(episode.env, "draws_globally", False) else nullcontext()

    @classmethod
    def of(cls, episode: TokenObservationWrapper) -> MultiTurnGym:
        """Return a gym that plays all episodes, one after the other, in the wrapper `episode`."""
        gym = cls(lambda: episode, max_environments=1)
        gym._renews = False
        return gym

    @property
    def side_by_side(self) -> bool:
        """Whether plays may run at once, in threads; False if one wrapper plays all episodes."""
        return self._renews

    @property
    def width(self) -> int | None:
        """Greatest number of environments that a play uses at once; None makes one per episode."""
        most = self.max_environments
        return None if most is None else most // self.plays

    @property
    def weights(self) -> Floats:
        """(1,) float64: the cumulative reward has weight 1."""
        return np.ones(1)

    def batch(self, step: int, size: int | None = None) -> list[int]:
        """Return `size` (None: `batch_size`) episode seeds of a step; the same at every call."""
        size = self.batch_size if size is None else size
        if step < 0 or size < 1:
            raise ConfigError(f"batch: expected step >= 0, size >= 1, got step {step}, size {size}")
        return self._seeds("train", step * size, size)

    def prompts(self, split: Split, size: int | None = None) -> list[int]:
        """Return `size` (None: `evaluation_size`) fixed seeds of a split.

        No two splits share seeds. A larger subset begins with any smaller one.
        """
        return self._seeds(split, 0, self._evaluation_size if size is None else size)

    def limit_context(self, max_context_length: int) -> None:
        """Limit episodes to the model's context."""
        self._context = min(max_context_length, self._max_model_len or max_context_length)
        for episode in self._idle:
            episode.limit_context(self._context)

    def begin(self, starts: Sequence[Sequence[int]], group_sizes: Sequence[int]) -> EpisodePlay:
        """Begin a play in which every agent plays a group of episodes from each seed."""
        return EpisodePlay(self, starts, group_sizes)

    def take(self) -> TokenObservationWrapper:
        """Return an idle environment, or else a new environment, for one episode."""
        with self._shared:
            episode = self._idle.pop() if self._idle else self._make()
            if self._renews and id(episode.env) in self._lent:
                raise ConfigError(
                    "env_factory: expected a new environment at each call, got the same "
                    f"{self.name} twice; episodes played side by side would mix"
                )
            self._lent[id(episode.env)] = episode
            return episode

    def give_back(self, episode: TokenObservationWrapper) -> None:
        """Keep an environment for another episode, or close it if its episode raised an error."""
        with self._shared:
            self._lent.pop(id(episode.env), None)
            # The state of an environment that raised is unknown.
            if episode.error and self._renews:
                episode.close()
            else:
                self._idle.append(episode)

    def count_failures(self, episodes: Sequence[Trajectory], seeds: int) -> None:
        """Count successive seeds whose episodes all failed; raise RunFailedError if too many."""
        reasons = Counter(t.error for t in episodes)
        with self._shared:
            # Plays that run at once have the same seeds.
            failed = 0.0 if reasons[""] else self._failed_seeds + seeds / self.plays
            self._failed_seeds = failed
        if episodes and failed >= MAX_FAILED_SEEDS:
            reason, times = reasons.most_common(1)[0]
            raise RunFailedError(
                f"environment {self.name!r}: all {len(episodes)} episodes were dropped, and so "
                f"were all of the last {failed:.0f} seeds, so there is nothing to learn "
                f"from; the commonest reason, {times} times: {reason}"
            )

    def close(self) -> None:
        """Close the environments that are kept for the next episodes."""
        for episode in self._idle:
            episode.close()
        self._idle = []

    def _make(self) -> TokenObservationWrapper:
        try:
            environment: object = Watch(None).run(Call(lambda: "env_factory", self.factory, {}))
        except RewardAbortError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise ConfigError(
                f"env_factory: it raised {error_text(error)}; expected an environment"
            ) from error
        if not isinstance(environment, TokenObservationWrapper):
            environment = self._wrapped(environment)
        if self._max_turns is not None:
            environment.max_turns = min(environment.max_turns, self._max_turns)
        if self._context is not None:
            environment.limit_context(self._context)
        return environment

    def _wrapped(self, made: object) -> TokenObservationWrapper:
        is_bare = isinstance(made, MultiTurnEnv)
        if not is_bare or self.tokenizer is None or self._max_turns is None:
            raise ConfigError(
                "env_factory: expected a TokenObservationWrapper, or, with tokenizer= and "
                "max_turns=, an environment with reset(seed) and step(action), got "
                f"{type(made).__name__}{' without the two' if is_bare else ''}"
            )
        return TokenObservationWrapper(
            made,
            self.tokenizer,
            self._max_turns,
            max_output_tokens=self.max_output_tokens,
            apply_chat_template=self._apply_chat_template,
            conversation_template=self._conversation_template,
            chat_template_kwargs=self._keywords,
        )

    def _seeds(self, split: Split, first: int, count: int) -> list[int]:
        return [
            derive(self.seed, "episodes", split, number) % _SEEDS
            for number in range(first, first + count)
        ]


class _Running(NamedTuple):
    """A running episode: its agent, its number among the agent's episodes, its seed."""

    agent: int
    key: int
    seed: int
    episode: TokenObservationWrapper


def _metrics(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics of one agent's episodes of a step.

    `dropped` is the number of dropped episodes. If all were dropped, `empty_steps` is 1. Otherwise,
    over the other episodes, `turns` is the mean number of completions, and `cut` the share that
    `max_turns` or the context ended.
    """
    kept_episodes = [t for t in episodes if not t.error]
    if not kept_episodes:
        return {"dropped": float(len(episodes)), "empty_steps": float(bool(episodes))}
    return {
        "dropped": float(len(episodes) - len(kept_episodes)),
        "turns": float(np.mean([t.turns for t in kept_episodes])),
        "cut": float(np.mean([t.end in ("max_turns", "context") for t in kept_episodes])),
    }


@final
class EpisodePlay:
    """A play in which each of N agents plays a group of episodes from each seed; see `Play`.

    An episode in which the environment raises an error is dropped: its reward is NaN.
    """

    def __init__(
        self,
        gym: MultiTurnGym,
        starts: Sequence[Sequence[int]],
        group_sizes: Sequence[int],
    ) -> None:
        self._gym = gym
        self._seeds = max(map(len, starts), default=0)
        planned = [
            (agent, position * size + number, seed)
            for agent, (agent_seeds, size) in enumerate(zip(starts, group_sizes, strict=True))
            for position, seed in enumerate(agent_seeds)
            for number in range(size)
        ]
        width = gym.width or max(1, len(planned))
        self._waves = [planned[i : i + width] for i in range(0, len(planned), width)]
        self._running: list[_Running] = []
        self._turn = 0
        self._done: list[list[Trajectory]] = [[] for _ in starts]
        self._rewards: list[list[float]] = [[] for _ in starts]
        self._begin_waves()

    def ask(self) -> Ask | None:
        """Return the prompts of the running episodes; an agent without any has no prompts."""
        live = self._live()
        if not any(live):
            return None
        return Ask(
            prompts=[[r.episode.prompt for r in agent_episodes] for agent_episodes in live],
            samples=[1] * len(live),
            turn=self._turn,
            keys=[[r.key for r in agent_episodes] for agent_episodes in live],
        )

    def tell(self, groups: Sequence[Sequence[CompletionGroup]]) -> None:
        """Step the environments with the completions."""
        with self._gym.stepping:
            watching(self._gym.reward_timeout, lambda watch: self._step(watch, groups))
        self._turn += 1
        if not any(self._live()):
            self._end_wave()
            self._begin_waves()

    def experiences(self) -> list[Experience]:
        """Return the trajectories and the rewards of each agent's episodes."""
        episodes = [episode for agent_episodes in self._done for episode in agent_episodes]
        self._gym.count_failures(episodes, self._seeds)
        return [
            Experience(
                tuple(agent_episodes),
                np.array(agent_rewards, dtype=np.float64)[:, None],
                _metrics(agent_episodes),
            )
            for agent_episodes, agent_rewards in zip(self._done, self._rewards, strict=True)
        ]

    def _live(self) -> list[list[_Running]]:
        live: list[list[_Running]] = [[] for _ in self._done]
        for running in self._running:
            if not running.episode.end:
                live[running.agent].append(running)
        return live

    def _step(self, watch: Watch, groups: Sequence[Sequence[CompletionGroup]]) -> None:
        for agent_episodes, agent_groups in zip(self._live(), groups, strict=True):
            for running, group in zip(agent_episodes, agent_groups, strict=True):
                (completion,) = group.completions
                self._attempt(watch, running, partial(running.episode.take_turn, completion))

    def _reset(self, watch: Watch) -> None:
        for running in self._running:
            self._attempt(watch, running, partial(running.episode.reset, seed=running.seed))

    def _attempt(self, watch: Watch, running: _Running, make: Callable[[], object]) -> None:
        """Call `make`, a reset or a step; drop the episode if the call raises an error."""
        episode = running.episode

        def title() -> str:
            return (
                f"environment {self._gym.name!r}, episode of seed {running.seed}, turn "
                f"{episode.turns}, prompt {excerpt(episode.prompt_text)}"
            )

        try:
            watch.run(Call(title, make, {}))
        except (ConfigError, RewardAbortError, KeyboardInterrupt):
            raise  # an error of the run, not of this episode
        except BaseException as error:  # user code may raise anything, SystemExit included
            episode.drop(error)

    def _begin_waves(self) -> None:
        """Reset the environments of the next wave; skip a wave whose resets all fail."""
        while self._waves:
            self._running = [_Running(*planned, self._gym.take()) for planned in self._waves.pop(0)]
            with self._gym.stepping:
                watching(self._gym.reward_timeout, self._reset)
            self._turn = 0
            if any(self._live()):
                return
            self._end_wave()

    def _end_wave(self) -> None:
        for running in self._running:
            episode = running.episode
            self._done[running.agent].append(episode.trajectory)
            self._rewards[running.agent].append(np.nan if episode.error else episode.total_reward)
            self._gym.give_back(episode)
        self._running = []
