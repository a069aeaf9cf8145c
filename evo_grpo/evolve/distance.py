"""Hyperparameters that are searched by their distance from 1: clip ends and AdamW decay rates.

A factor on such a number itself would be too coarse: 0.999 * 0.8 = 0.7992.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evo_grpo.schema.hparams import BETAS

if TYPE_CHECKING:
    from evo_grpo.schema.search_space import RLParameter

_BELOW = ("clip_low", *BETAS)
"""Those that are below 1."""
_ABOVE = ("clip_high",)


def end_of_distance(name: str, distance: RLParameter) -> RLParameter:
    """Return the range of the bound at one end of a clip range, given that of its distance."""
    if name in _BELOW:
        return distance.within(max(0.0, 1 - distance.max), 1 - distance.min)
    return distance.within(1 + distance.min, 1 + distance.max)


def distance_range(name: str, parameter: RLParameter) -> RLParameter | None:
    """Return the range of the distance from 1 of a hyperparameter that is searched by it.

    None for all other hyperparameters, for choices, and if the range contains 1.
    """
    if parameter.choices is not None:
        return None
    if name in _BELOW and parameter.max <= 1:
        return parameter.within(1 - parameter.max, 1 - parameter.min)
    if name in _ABOVE and parameter.min >= 1:
        return parameter.within(parameter.min - 1, parameter.max - 1)
    return None


def from_distance(name: str, parameter: RLParameter, distance: float) -> float:
    """Return the value at a distance from 1, clamped to its range."""
    return parameter.clip(1 - distance if name in _BELOW else 1 + distance)
