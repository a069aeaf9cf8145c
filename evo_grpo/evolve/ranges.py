"""Computes values in hyperparameter ranges: draws, shares of a range, distances from 1.

Clip ends and the decay rates of AdamW are searched by their distance from 1, because a factor on
the number itself would be too coarse: 0.999 * 0.8 = 0.7992.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from evo_grpo.schema.hparams import BETAS, CLIP_ENDS, Hparams, Value
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

if TYPE_CHECKING:
    import numpy as np

_BELOW = ("clip_low", *BETAS)
"""Hyperparameters whose values are below 1."""
_ABOVE = ("clip_high",)


def end_of_distance(name: str, distance: RLParameter) -> RLParameter:
    """Return the range of the clip end `name`, given the range of its distance from 1."""
    if name in _BELOW:
        return distance.within(max(0.0, 1 - distance.max), 1 - distance.min)
    return distance.within(1 + distance.min, 1 + distance.max)


def distance_range(name: str, parameter: RLParameter) -> RLParameter | None:
    """Return the range of a hyperparameter's distance from 1, if that distance is searched.

    Returns None for all other hyperparameters, for choices, and for a range that has values on both
    sides of 1.
    """
    if parameter.choices is not None:
        return None
    if name in _BELOW and parameter.max <= 1:
        return parameter.within(1 - parameter.max, 1 - parameter.min)
    if name in _ABOVE and parameter.min >= 1:
        return parameter.within(parameter.min - 1, parameter.max - 1)
    return None


def from_distance(name: str, parameter: RLParameter, distance: float) -> float:
    """Return the value of hyperparameter `name` at a distance from 1, clamped to its range."""
    return parameter.clip(1 - distance if name in _BELOW else 1 + distance)


def parts(hparams: Hparams, ranges: Mapping[str, RLParameter]) -> Iterator[tuple[str, RLParameter]]:
    """Yield each name in `ranges` with its range; a clip_coef pair yields its two ends."""
    for name, parameter in ranges.items():
        if name == "clip_coef" and isinstance(hparams.clip_coef, tuple):
            yield from ((end, end_of_distance(end, parameter)) for end in CLIP_ENDS)
        else:
            yield name, parameter


def first_parts(
    first: Hparams, hp_config: HyperparameterConfig
) -> tuple[dict[str, RLParameter], dict[str, RLParameter]]:
    """Return the ranges that the first population is drawn from: (all but clip ends, clip ends)."""
    ranges = {name: parameter.first for name, parameter in hp_config.parameters.items()}
    plain: dict[str, RLParameter] = {}
    clip_ends: dict[str, RLParameter] = {}
    for name, parameter in parts(first, ranges):
        (clip_ends if name in CLIP_ENDS else plain)[name] = parameter
    return plain, clip_ends


def latin_hypercube(rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Return points of a Latin hypercube, an array (rows, columns) of floats in (0, 1].

    In each column, each stratum (i / rows, (i + 1) / rows] holds exactly one value.
    """
    import numpy as np  # slow to import, and planning a run draws nothing

    strata = np.stack([rng.permutation(rows) for _ in range(columns)], axis=1)
    # In (0, 1], so that a range that begins at 0 yields no 0: lr and clip_coef could not take it.
    return (strata + 1.0 - rng.random((rows, columns))) / rows


def draw_value(name: str, parameter: RLParameter, rng: np.random.Generator) -> Value:
    """Draw a choice or a value: log-uniform in a range above 0, uniform in a range from 0."""
    if parameter.choices is not None:
        return parameter.choices[int(rng.integers(len(parameter.choices)))]
    measure = distance_range(name, parameter) or parameter
    if measure.dtype == "int" and measure.min == 0:
        return int(rng.integers(0, math.floor(measure.max) + 1))
    return placed(name, parameter, 1.0 - rng.random())


def placed(name: str, parameter: RLParameter, share: float) -> float:
    """Return the value of hyperparameter `name` at a share of its range, as `value_at` does."""
    distance = distance_range(name, parameter)
    if distance is None:
        return value_at(parameter, share)
    return from_distance(name, parameter, value_at(distance, share))


def value_at(parameter: RLParameter, share: float) -> float:
    """Return the value at a share in (0, 1] of a range, on a log scale if the range is above 0."""
    low, high = parameter.min, parameter.max
    if parameter.dtype == "int":
        if low == 0:
            return math.ceil(share * (math.floor(high) + 1)) - 1
        low, high = low - 0.5, high + 0.5
    if low > 0:
        return parameter.clip(math.exp(math.log(low) + share * (math.log(high) - math.log(low))))
    return parameter.clip(low + share * (high - low))


def share_of(name: str, parameter: RLParameter, value: float) -> float:
    """Return the share of the range at which `value` of `name` lies; the inverse of `placed`."""
    distance = distance_range(name, parameter)
    if distance is not None:
        parameter, value = distance, abs(value - 1)
    low, high = parameter.min, parameter.max
    if parameter.dtype == "int":
        low, high = low - 0.5, high + 0.5
    if high <= low:
        return 1.0
    if low > 0:
        share = math.log(max(value, low) / low) / math.log(high / low)
    else:
        share = (value - low) / (high - low)
    return min(1.0, max(0.0, share))
