"""What a multi-turn environment returns, checked: a mistake is named by environment and method."""

from __future__ import annotations

import math
from typing import Any, cast

from evo_grpo.errors import DataError, RewardError


def begun(name: str, said: object) -> tuple[str, dict[str, Any]]:
    """Check what `reset` returned: (text, info).

    Raises:
        DataError: It is something else.
    """
    text, info = _parts(f"{name}.reset", said, ("text", "info"))
    return as_text(f"{name}.reset", text), dict(info or {})


def stepped(name: str, said: object) -> tuple[object, float, bool, bool, dict[str, Any]]:
    """Check what `step` returned: (text, reward, terminated, truncated, info).

    The text is left as it is, since nobody reads it when the episode is over.

    Raises:
        DataError: It is something else.
        RewardError: The reward is no finite number.
    """
    place = f"{name}.step"
    text, reward, terminated, truncated, info = _parts(
        place, said, ("text", "reward", "terminated", "truncated", "info")
    )
    try:
        number = float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(f"{place}: expected a finite reward, got {reward!r}")
    return text, number, bool(terminated), bool(truncated), dict(info or {})


def as_text(place: str, said: object) -> str:
    """Check what the policy is to read.

    Raises:
        DataError: It is no text.
    """
    if not isinstance(said, str):
        raise DataError(f"{place}: expected a text for the policy, got {said!r}")
    return said


def _parts(place: str, said: object, names: tuple[str, ...]) -> tuple[Any, ...]:
    if not isinstance(said, tuple) or len(cast("tuple[Any, ...]", said)) != len(names):
        raise DataError(f"{place}: expected a tuple ({', '.join(names)}), got {said!r}")
    return cast("tuple[Any, ...]", said)
