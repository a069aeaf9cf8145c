"""Warns after the first round if a run cannot learn because every group had equal rewards."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence

from evo_grpo.envs.messages import excerpt
from evo_grpo.population.stats import Tally

_log = logging.getLogger(__name__)


def warn_without_signal(sentence: str) -> None:
    """Warn and log that the first round had nothing to learn from, unless `sentence` is empty."""
    if sentence:
        _log.warning(sentence)
        warnings.warn(sentence, UserWarning, stacklevel=2)


def without_signal(tallies: Sequence[Tally]) -> str:
    """Return a warning if all groups of all agents had equal rewards, else an empty string.

    The string is also empty if every reward function abstained or every episode was dropped; other
    warnings report those.
    """
    steps = [m for tally in tallies for m in tally.metrics if not m.get("empty_steps")]
    means = [m["reward"] for m in steps if math.isfinite(m.get("reward", math.nan))]
    if not means or any(m["zero_variance"] < 1 for m in steps):
        return ""
    low, high = min(means), max(means)
    rewards = f"all of them {low:g}" if low == high else f"between {low:g} and {high:g} on average"
    return (
        f"round 1 had nothing to learn from: the completions of each group got equal rewards, "
        f"{rewards}. Either the reward is always the same, or the task is too hard (nothing earns "
        "more than the least) or too easy (everything earns the most), or the temperature is too "
        f"low for completions to differ{_example(tallies)}"
    )


def _example(tallies: Sequence[Tally]) -> str:
    for tally in tallies:
        for trajectory, reward in tally.samples:
            if math.isfinite(reward):
                return (
                    f"; for instance prompt {excerpt(trajectory.prompt)}, completion "
                    f"{excerpt(trajectory.text)}, reward {reward:g}"
                )
    return ""
