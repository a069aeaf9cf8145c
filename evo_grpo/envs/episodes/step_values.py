"""Checks of what a multi-turn environment returns; errors name environment and method."""

from __future__ import annotations

import math
from typing import Any, cast

from evo_grpo.envs.messages import excerpt
from evo_grpo.envs.rewards.reward_values import LARGEST
from evo_grpo.errors import DataError, RewardError
from evo_grpo.validation import shown

LONGEST_MESSAGE = 1_000_000
"""Characters of an environment's message: more fit no context, and would only cost time."""


def check_reset(name: str, returned: object) -> tuple[str, dict[str, Any]]:
    """Check what `reset` returned: (text, info).

    Raises:
        DataError: It is anything else.
    """
    text, info = _parts(f"{name}.reset", returned, ("text", "info"))
    return check_text(f"{name}.reset", text), dict(info or {})


def check_step(name: str, returned: object) -> tuple[object, float, bool, bool, dict[str, Any]]:
    """Check what `step` returned: (text, reward, terminated, truncated, info).

    The text is not checked, since it is not read when the episode is over.

    Raises:
        DataError: It is anything else.
        RewardError: The reward is not a finite number.
    """
    place = f"{name}.step"
    text, reward, terminated, truncated, info = _parts(
        place, returned, ("text", "reward", "terminated", "truncated", "info")
    )
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not -LARGEST <= number <= LARGEST:  # NaN is not
        bound = f" from -{LARGEST:g} to {LARGEST:g}" if math.isfinite(number) else ""
        raise RewardError(f"{place}: expected a finite reward{bound}, got {shown(reward)}")
    return text, number, bool(terminated), bool(truncated), dict(info or {})


def check_text(place: str, value: object) -> str:
    """Check what the policy is to read.

    Raises:
        DataError: It is not a string, or longer than any context.
    """
    if not isinstance(value, str):
        raise DataError(f"{place}: expected a string for the policy, got {shown(value)}")
    if len(value) > LONGEST_MESSAGE:
        raise DataError(
            f"{place}: expected a message of at most {LONGEST_MESSAGE:,} characters, got "
            f"{len(value):,}: {excerpt(value)}; shorten it"
        )
    return value


def _parts(place: str, returned: object, names: tuple[str, ...]) -> tuple[Any, ...]:
    if not isinstance(returned, tuple) or len(cast("tuple[Any, ...]", returned)) != len(names):
        raise DataError(f"{place}: expected a tuple ({', '.join(names)}), got {shown(returned)}")
    return cast("tuple[Any, ...]", returned)
