"""Checks of the results of a multi-turn environment; errors name environment and method."""

from __future__ import annotations

import math
from typing import Any, cast

from evo_grpo.envs.messages import excerpt
from evo_grpo.errors import DataError, RewardError
from evo_grpo.schema.validation import LARGEST_REWARD as LARGEST
from evo_grpo.schema.validation import shown

LONGEST_MESSAGE = 1_000_000
"""Most characters in a message of an environment; more fit into no context."""


def check_reset(name: str, returned: object) -> tuple[str, dict[str, Any]]:
    """Check the result of `reset`: (text, info)."""
    place = f"{name}.reset"
    text, info = _parts(place, returned, ("text", "info"))
    return check_text(place, text), _info(place, info)


def check_step(name: str, returned: object) -> tuple[object, float, bool, bool, dict[str, Any]]:
    """Check the result of `step`: (text, reward, terminated, truncated, info).

    The text is not checked: at the end of an episode it is not used.
    """
    place = f"{name}.step"
    text, reward, terminated, truncated, info = _parts(
        place, returned, ("text", "reward", "terminated", "truncated", "info")
    )
    number = check_reward(place, reward)
    ends = check_flag(place, "terminated", terminated), check_flag(place, "truncated", truncated)
    return text, number, *ends, _info(place, info)


def check_reward(place: str, reward: Any) -> float:  # noqa: ANN401 -- whatever a game returned
    """Return the reward of a turn as a finite float, or raise RewardError."""
    try:
        # float() accepts strings too, which are refused here as for reward functions.
        number = math.nan if isinstance(reward, str | bytes) else float(reward)
    except Exception:  # its __float__ may raise anything; the error below names it
        number = math.nan
    if not -LARGEST <= number <= LARGEST:  # NaN is not
        bound = f" from -{LARGEST:g} to {LARGEST:g}" if math.isfinite(number) else ""
        raise RewardError(f"{place}: expected a finite reward{bound}, got {shown(reward)}")
    return number


def check_text(place: str, value: object) -> str:
    """Return a message as a string of at most `LONGEST_MESSAGE` characters, or raise DataError."""
    if not issubclass(type(value), str):
        raise DataError(f"{place}: expected a string for the policy, got {shown(value)}")
    text = cast("str", value)
    if len(text) > LONGEST_MESSAGE:
        raise DataError(
            f"{place}: expected a message of at most {LONGEST_MESSAGE:,} characters, got "
            f"{len(text):,}: {excerpt(text)}; shorten it"
        )
    return text


def check_flag(place: str, name: str, value: Any) -> bool:  # noqa: ANN401 -- whatever a game returned
    """Return a flag for True, False, or a number or array of one element that equals one of them.

    None is False. Strings are refused, because bool("False") is True.
    """
    if value is None:
        return False
    cause: Exception | None = None
    try:
        for flag in (False, True):
            if value == flag:
                return flag
    except Exception as error:  # an array, or a value whose __eq__ raises
        cause = error
    raise DataError(
        f"{place}: expected {name} to be True or False, got {shown(value)}; return a bool"
    ) from cause


def _info(place: str, value: Any) -> dict[str, Any]:  # noqa: ANN401 -- whatever a game returned
    try:
        return {} if value is None else dict(value)
    except Exception as error:
        raise DataError(f"{place}: expected info to be a dict, got {shown(value)}") from error


def _parts(place: str, returned: object, names: tuple[str, ...]) -> tuple[Any, ...]:
    # By type(): a value may report another __class__, or raise.
    if not issubclass(type(returned), tuple) or len(cast("Any", returned)) != len(names):
        raise DataError(f"{place}: expected a tuple ({', '.join(names)}), got {shown(returned)}")
    return cast("tuple[Any, ...]", returned)
