"""Episodes in which the environment raised: left out, counted, and borne up to a point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from evo_grpo.envs.episodes.multi_turn import TokenObservationWrapper
from evo_grpo.errors import ConfigError, RunFailedError
from evo_grpo.types import Trajectory

#: So many episode seeds in a row of which no episode was kept are no accident any more.
SILENT_SEEDS = 16


def guarded(
    episode: TokenObservationWrapper, move: Callable[[TokenObservationWrapper], object]
) -> None:
    """Make a move; an environment that raises loses its episode, not the run."""
    try:
        move(episode)
    except ConfigError:  # a setting is wrong, not this episode
        raise
    except (Exception, SystemExit) as error:  # other people's code; sys.exit() is theirs too
        episode.drop(error)


def counts(played: Sequence[Trajectory]) -> dict[str, float]:
    """Return what one policy's episodes of a step come to.

    Args:
        played: All of them, dropped ones too.

    Returns:
        dropped (episodes), empty_steps (1 when none was kept); else turns (mean) and cut (share
        that the bound of turns or the context ended).
    """
    kept = [t for t in played if not t.error]
    if not kept:
        return {"dropped": float(len(played)), "empty_steps": float(bool(played))}
    return {
        "dropped": float(len(played) - len(kept)),
        "turns": float(np.mean([t.turns for t in kept])),
        "cut": float(np.mean([t.end in ("max_turns", "context") for t in kept])),
    }


@final
class Patience:
    """Bears a step of bad seeds, which may be a single one, but not an environment that fails."""

    def __init__(self) -> None:
        self.silent = 0

    def saw(self, name: str, played: Sequence[Trajectory], seeds: int) -> None:
        """Take note of a step.

        Args:
            name: The environment, for messages.
            played: The episodes of all policies.
            seeds: How many seeds they were played from.

        Raises:
            RunFailedError: No episode of the last `SILENT_SEEDS` seeds or more was kept.
        """
        reasons = Counter(t.error for t in played)
        self.silent = 0 if reasons[""] else self.silent + seeds
        if played and self.silent >= SILENT_SEEDS:
            reason, times = reasons.most_common(1)[0]
            raise RunFailedError(
                f"environment {name!r}: all {len(played)} episodes were dropped, and so were all "
                f"of the last {self.silent} seeds, so there is nothing to learn from; the "
                f"commonest reason, {times} times: {reason}"
            )
