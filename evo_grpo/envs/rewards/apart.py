"""Each reward function by itself, where several make up the reward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evo_grpo.envs.protocol import Floats
from evo_grpo.record.vocabulary import REWARD_OF


def reward_of_each(names: Sequence[str], rewards: Floats) -> dict[str, float]:
    """Return the mean reward of each function, without weights.

    Args:
        names: K names; fewer than two give nothing, since the mean reward says it already.
        rewards: (B, K) float64, NaN where a function abstained or the group was set aside.

    Returns:
        A mean by `reward/<name>`; a function that abstained everywhere has none.
    """
    if len(names) < 2:
        return {}
    columns = zip(names, np.isfinite(rewards).T, rewards.T, strict=True)
    return {
        f"{REWARD_OF}{name}": float(column[known].mean())
        for name, known, column in columns
        if known.any()
    }
