"""EpisodePlay: the episodes of all agents side by side, one generation call per turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, final

import numpy as np

from evo_grpo.envs.episodes.failures import FailureStreak, Move, attempt, episode_metrics
from evo_grpo.envs.episodes.multi_turn import TokenObservationWrapper
from evo_grpo.envs.protocol import Ask, Experience
from evo_grpo.envs.rewards.watch import Watch, watching
from evo_grpo.errors import ConfigError
from evo_grpo.types import CompletionGroup, Trajectory


class EpisodePool(Protocol):
    """Lends environments."""

    name: str

    def take(self) -> TokenObservationWrapper:
        """Return an environment that no other episode is played in."""
        ...

    def give_back(self, episode: TokenObservationWrapper) -> None:
        """Take an environment back after its episode."""
        ...


@dataclass(frozen=True)
class _Planned:
    """An episode to be played: whose, its number in the agent's draws, and its seed."""

    agent: int
    key: int
    seed: int


@dataclass(frozen=True)
class _Running:
    """An episode that is being played: whose, its number, its seed, and the wrapper."""

    agent: int
    key: int
    seed: int
    episode: TokenObservationWrapper


@final
class EpisodePlay:
    """N agents play a group of episodes of each of their seeds; see `Play`.

    An episode in which the environment raises is dropped: its reward is NaN, an abstention.

    Args:
        pool: Where environments come from.
        starts: Per agent its episode seeds.
        group_sizes: Per agent G, episodes of each seed.
        max_environments: Environments at once; more episodes are played in several waves. None is
            no bound.
        failures: Counts seeds without an episode from one play to the next.
        timeout: Seconds that a reset or a step may take; None is no limit.

    Raises:
        ConfigError: The pool's factory fails, or makes the same environment twice.
    """

    def __init__(
        self,
        pool: EpisodePool,
        starts: Sequence[Sequence[int]],
        group_sizes: Sequence[int],
        *,
        max_environments: int | None,
        failures: FailureStreak,
        timeout: float | None = None,
    ) -> None:
        self._pool = pool
        self._failures = failures
        self._timeout = timeout
        self._seeds = max(map(len, starts), default=0)
        planned = [
            _Planned(agent, position * size + number, seed)
            for agent, (mine, size) in enumerate(zip(starts, group_sizes, strict=True))
            for position, seed in enumerate(mine)
            for number in range(size)
        ]
        width = max_environments or max(1, len(planned))
        self._waves = [planned[i : i + width] for i in range(0, len(planned), width)]
        self._running: list[_Running] = []
        self._turn = 0
        self._done: list[list[Trajectory]] = [[] for _ in starts]
        self._rewards: list[list[float]] = [[] for _ in starts]
        self._begin_waves()

    def ask(self) -> Ask | None:
        """See `Play`; an agent with no live episode has no prompts."""
        live = self._live()
        if not any(live):
            return None
        return Ask(
            prompts=[[r.episode.prompt for r in mine] for mine in live],
            samples=[1] * len(live),
            turn=self._turn,
            keys=[[r.key for r in mine] for mine in live],
        )

    def tell(self, groups: Sequence[Sequence[CompletionGroup]]) -> None:
        """See `Play`; the environments step here."""
        watching(self._timeout, lambda watch: self._step(watch, groups))
        self._turn += 1
        if not any(self._live()):
            self._end_wave()
            self._begin_waves()

    def experiences(self) -> list[Experience]:
        """See `Play`.

        Raises:
            RunFailedError: Every episode of every agent was dropped, for `MAX_FAILED_SEEDS` seeds
                in a row or more.
        """
        self._failures.record(
            self._pool.name, [t for mine in self._done for t in mine], self._seeds
        )
        return [
            Experience(
                tuple(mine), np.array(earned, dtype=np.float64)[:, None], episode_metrics(mine)
            )
            for mine, earned in zip(self._done, self._rewards, strict=True)
        ]

    def _live(self) -> list[list[_Running]]:
        live: list[list[_Running]] = [[] for _ in self._done]
        for running in self._running:
            if not running.episode.end:
                live[running.agent].append(running)
        return live

    def _step(self, watch: Watch, groups: Sequence[Sequence[CompletionGroup]]) -> None:
        for mine, sampled in zip(self._live(), groups, strict=True):
            for running, group in zip(mine, sampled, strict=True):
                (completion,) = group.completions
                turn = partial(running.episode.take_turn, completion)
                attempt(watch, self._move(running), turn)

    def _reset(self, watch: Watch) -> None:
        for running in self._running:
            attempt(watch, self._move(running), partial(running.episode.reset, seed=running.seed))

    def _move(self, running: _Running) -> Move:
        return Move(self._pool.name, running.seed, running.episode)

    def _begin_waves(self) -> None:
        """Reset the next wave's environments; one whose resets all fail is over at once."""
        while self._waves:
            planned = self._waves.pop(0)
            self._running = [_Running(p.agent, p.key, p.seed, self._pool.take()) for p in planned]
            if len({id(r.episode.env) for r in self._running}) < len(self._running):
                raise ConfigError(
                    "env_factory: expected a new environment at each call, got the same "
                    f"{self._pool.name} twice; episodes played side by side would mix"
                )
            watching(self._timeout, self._reset)
            self._turn = 0
            if any(self._live()):
                return
            self._end_wave()

    def _end_wave(self) -> None:
        for running in self._running:
            episode = running.episode
            self._done[running.agent].append(episode.trajectory)
            self._rewards[running.agent].append(np.nan if episode.error else episode.total_reward)
            self._pool.give_back(episode)
        self._running = []
