"""Failed episodes, in which the environment raised: excluded, counted, fatal in a long row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from evo_grpo.envs.episodes.multi_turn import TokenObservationWrapper
from evo_grpo.envs.messages import excerpt
from evo_grpo.envs.rewards.watch import Watch
from evo_grpo.errors import ConfigError, RewardAbortError, RunFailedError
from evo_grpo.types import Trajectory

#: This many episode seeds in a row without a single successful episode end the run.
MAX_FAILED_SEEDS = 16


@dataclass(frozen=True)
class Move:
    """A reset or a step of an episode, for messages.

    Attributes:
        name: The environment.
        seed: Of the episode.
        episode: What is played.
    """

    name: str
    seed: int
    episode: TokenObservationWrapper

    def title(self) -> str:
        """Name the environment, the episode and its turn."""
        prompt = excerpt(self.episode.prompt_text)
        return (
            f"environment {self.name!r}, episode of seed {self.seed}, turn {self.episode.turns}, "
            f"prompt {prompt}"
        )


def attempt(watch: Watch, move: Move, make: Callable[[], object]) -> None:
    """Make a move; an environment that raises loses its episode, not the run.

    Args:
        watch: Looks how long it takes.
        move: Which one.
        make: Makes it.

    Raises:
        ConfigError: A setting is wrong, not this episode.
        RewardAbortError: It took too long, or left torch's gradients off.
    """
    try:
        watch.run(move, make, {})
    except (ConfigError, RewardAbortError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's code may raise anything, sys.exit() included
        move.episode.drop(error)


def episode_metrics(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics of one agent's episodes of a step.

    Args:
        episodes: All of them, dropped ones too.

    Returns:
        dropped (episodes), empty_steps (1 when none is left); else turns (mean) and cut (share
        that the bound of turns or the context ended).
    """
    kept = [t for t in episodes if not t.error]
    if not kept:
        return {"dropped": float(len(episodes)), "empty_steps": float(bool(episodes))}
    return {
        "dropped": float(len(episodes) - len(kept)),
        "turns": float(np.mean([t.turns for t in kept])),
        "cut": float(np.mean([t.end in ("max_turns", "context") for t in kept])),
    }


@final
class FailureStreak:
    """Counts the seeds in a row of which every episode failed.

    A step of failures, which may have a single seed, is tolerated; an environment that no longer
    works is not.
    """

    def __init__(self) -> None:
        self.seeds = 0

    def record(self, name: str, episodes: Sequence[Trajectory], seeds: int) -> None:
        """Add the episodes of one play.

        Args:
            name: The environment, for messages.
            episodes: Those of all agents.
            seeds: Number of different seeds they were played from.

        Raises:
            RunFailedError: Every episode of the last `MAX_FAILED_SEEDS` seeds or more failed.
        """
        reasons = Counter(t.error for t in episodes)
        self.seeds = 0 if reasons[""] else self.seeds + seeds
        if episodes and self.seeds >= MAX_FAILED_SEEDS:
            reason, times = reasons.most_common(1)[0]
            raise RunFailedError(
                f"environment {name!r}: all {len(episodes)} episodes were dropped, and so were all "
                f"of the last {self.seeds} seeds, so there is nothing to learn from; the "
                f"commonest reason, {times} times: {reason}"
            )
