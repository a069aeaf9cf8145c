"""Checks of what a multi-turn environment returns; errors name environment and method."""

from __future__ import annotations

import math
from typing import Any, cast

from evo_grpo.envs.messages import excerpt
from evo_grpo.errors import DataError, RewardError
from evo_grpo.validation import LARGEST_REWARD as LARGEST
from evo_grpo.validation import shown

LONGEST_MESSAGE = 1_000_000
"""Characters of an environment's message: more fit no context, and would only cost time."""


def check_reset(name: str, returned: object) -> tuple[str, dict[str, Any]]:
    """Check what `reset` returned: (text, info).

    Raises:
        DataError: It is anything else.
    """
    place = f"{name}.reset"
    text, info = _parts(place, returned, ("text", "info"))
    return check_text(place, text), _info(place, info)


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
    except Exception:  # a value's own __float__ may raise anything; it is named below
        number = math.nan
    if not -LARGEST <= number <= LARGEST:  # NaN is not
        bound = f" from -{LARGEST:g} to {LARGEST:g}" if math.isfinite(number) else ""
        raise RewardError(f"{place}: expected a finite reward{bound}, got {shown(reward)}")
    ends = _flag(place, "terminated", terminated), _flag(place, "truncated", truncated)
    return text, number, *ends, _info(place, info)


def check_text(place: str, value: object) -> str:
    """Check what the policy is to read.

    Raises:
        DataError: It is not a string, or longer than any context.
    """
    if not issubclass(type(value), str):
        raise DataError(f"{place}: expected a string for the policy, got {shown(value)}")
    text = cast("str", value)
    if len(text) > LONGEST_MESSAGE:
        raise DataError(
            f"{place}: expected a message of at most {LONGEST_MESSAGE:,} characters, got "
            f"{len(text):,}: {excerpt(text)}; shorten it"
        )
    return text


def _flag(place: str, name: str, value: Any) -> bool:  # noqa: ANN401 -- whatever a game returned
    try:
        return bool(value)
    except Exception as error:  # an array, or a value whose own __bool__ raises
        raise DataError(
            f"{place}: expected {name} to be True or False, got {shown(value)}"
        ) from error


def _info(place: str, value: Any) -> dict[str, Any]:  # noqa: ANN401 -- whatever a game returned
    try:
        return {} if value is None else dict(value)
    except Exception as error:
        raise DataError(f"{place}: expected info to be a dict, got {shown(value)}") from error


def _parts(place: str, returned: object, names: tuple[str, ...]) -> tuple[Any, ...]:
    # By its type: a value may say anything of its own class, or raise.
    if not issubclass(type(returned), tuple) or len(cast("Any", returned)) != len(names):
        raise DataError(f"{place}: expected a tuple ({', '.join(names)}), got {shown(returned)}")
    return cast("tuple[Any, ...]", returned)
