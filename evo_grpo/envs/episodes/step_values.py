"""Checks of what a multi-turn environment returns; errors name environment and method."""

from __future__ import annotations

import math
from typing import Any, cast

from evo_grpo.errors import DataError, RewardError


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
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(f"{place}: expected a finite reward, got {reward!r}")
    return text, number, bool(terminated), bool(truncated), dict(info or {})


def check_text(place: str, value: object) -> str:
    """Check what the policy is to read.

    Raises:
        DataError: It is not a string.
    """
    if not isinstance(value, str):
        raise DataError(f"{place}: expected a string for the policy, got {value!r}")
    return value


def _parts(place: str, returned: object, names: tuple[str, ...]) -> tuple[Any, ...]:
    if not isinstance(returned, tuple) or len(cast("tuple[Any, ...]", returned)) != len(names):
        raise DataError(f"{place}: expected a tuple ({', '.join(names)}), got {returned!r}")
    return cast("tuple[Any, ...]", returned)
