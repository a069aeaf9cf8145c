"""The soft overlong penalty: a reward that falls as a completion nears the longest length; pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evo_grpo.envs.protocol import Experience, Floats
from evo_grpo.types import Trajectory

METRIC = "overlong_penalty"


def overlong_penalties(lengths: Sequence[int], longest: int, buffer: int) -> Floats:
    """Return the soft overlong punishment of DAPO (arXiv:2503.14476, equation 13).

    Args:
        lengths: B lengths of completions, in tokens.
        longest: Most tokens of a completion.
        buffer: Tokens before `longest` over which the penalty grows, 1 to `longest`.

    Returns:
        (B,) float64: 0 up to `longest - buffer` tokens, then falling linearly to -1 at `longest`
        tokens and beyond.
    """
    beyond = np.asarray(lengths, dtype=np.float64) - (longest - buffer)
    return np.clip(-beyond / buffer, -1.0, 0.0)


def with_overlong_penalty(experience: Experience, penalties: Floats, weight: float) -> Experience:
    """Return an experience with penalties (B,) as a further column of its rewards, of a weight.

    A row in which every reward function abstained keeps having no reward. The metric
    `overlong_penalty` is the weighted mean of the others.
    """
    known = ~np.isnan(experience.rewards).all(axis=1)
    column = np.where(known, penalties, np.nan)[:, None]
    mean = float(weight * penalties[known].mean()) if known.any() else 0.0
    return Experience(
        experience.trajectories,
        np.concatenate([experience.rewards, column], axis=1),
        {**experience.metrics, METRIC: mean},
    )


def longest_completion(trajectory: Trajectory) -> int:
    """Return the tokens of a completion, or of the longest one of an episode."""
    if trajectory.turns == 1:
        return trajectory.sampled
    # Between two completions of an episode are tokens of the environment or the chat template.
    edges = np.flatnonzero(np.diff(np.r_[False, trajectory.mask, False].astype(np.int8)))
    return int((edges[1::2] - edges[::2]).max(initial=0))
