"""The hyperparameters that the agents of the first population begin with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.clip_ends import distance_of_end, end_of_distance, from_distance
from evo_grpo.schema.hparams import CLIP_ENDS

if TYPE_CHECKING:
    import numpy as np

    from evo_grpo.schema.hparams import Hparams
    from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

_ATTEMPTS = 1000  # overlapping ranges of clip_low and clip_high are drawn until low < high


def sample_hparams(
    base: Hparams, hp_config: HyperparameterConfig, rng: np.random.Generator
) -> Hparams:
    """Draw every hyperparameter that may mutate from its range, for the first population.

    The draw is uniform in the logarithm; where the least value is 0, which has none, it is uniform
    in the value. Ends of a clip pair are drawn by their distance from 1, as they mutate.

    Args:
        base: Where everything comes from that does not mutate.
        hp_config: What to draw within which bounds.
        rng: The stream that the draws come from.

    Raises:
        ConfigError: When the ranges of clip_low and clip_high leave no low < high.
    """
    drawn = base
    clip_ends: dict[str, RLParameter] = {}
    for name in hp_config.names():
        parameter = hp_config[name]
        if name in CLIP_ENDS:
            clip_ends[name] = parameter
        elif name == "clip_coef" and isinstance(base.clip_coef, tuple):
            clip_ends = {end: end_of_distance(end, parameter) for end in CLIP_ENDS}
        else:
            drawn = drawn.with_value(name, _draw(parameter, rng))
    if not clip_ends:
        return drawn
    for _ in range(_ATTEMPTS):
        low, high = base.clip_bounds
        if "clip_low" in clip_ends:
            low = _draw_clip_end("clip_low", clip_ends["clip_low"], rng)
        if "clip_high" in clip_ends:
            high = _draw_clip_end("clip_high", clip_ends["clip_high"], rng)
        if low < high:
            return drawn.replace(clip_coef=(low, high))
    ranges = ", ".join(f"{end} in [{p.min}, {p.max}]" for end, p in clip_ends.items())
    raise ConfigError(
        f"clip_coef: expected ranges that leave room for low < high, got {ranges} beside "
        f"{base.clip_coef!r}"
    )


def _draw(parameter: RLParameter, rng: np.random.Generator) -> float:
    """Draw from a range; an int's ends get the same share as the values between."""
    low, high = parameter.min, parameter.max
    if parameter.dtype == "int":
        if low == 0:
            return int(rng.integers(math.ceil(low), math.floor(high) + 1))
        low, high = low - 0.5, high + 0.5
    # In (0, 1], so that a range that begins at 0 yields no 0: lr and clip_coef could not take it.
    share = 1.0 - rng.random()
    if low > 0:
        return parameter.clip(math.exp(math.log(low) + share * (math.log(high) - math.log(low))))
    return parameter.clip(low + share * (high - low))


def _draw_clip_end(name: str, end: RLParameter, rng: np.random.Generator) -> float:
    distance = distance_of_end(name, end)
    return _draw(end, rng) if distance is None else from_distance(name, end, _draw(distance, rng))
