"""Changes single hyperparameters of an agent; all explorations use these functions."""

from collections.abc import Mapping, Sequence
from typing import cast

from evo_grpo.evolve.ranges import distance_range, from_distance, placed, share_of
from evo_grpo.evolve.start import with_values
from evo_grpo.schema.hparams import CLIP_ENDS, LEAST_LR, Hparams, Value
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

_SAME = 1e-6
"""Values closer than this share of their range are the same."""


def value_of(hparams: Hparams, name: str, parameter: RLParameter) -> Value:
    """Return a hyperparameter's value; for None, the maximum of the range or the first choice."""
    value = hparams.get(name)
    if value is not None:
        return value
    return parameter.clip(parameter.max) if parameter.choices is None else parameter.choices[0]


def put(hparams: Hparams, values: Mapping[str, Value], space: Mapping[str, RLParameter]) -> Hparams:
    """Return hyperparameters with the `values` that have a range in `space`."""
    new = {
        name: value
        for name, value in values.items()
        if name in space and value != value_of(hparams, name, space[name])
    }
    return with_values(hparams, new, space)


def lower_lr(hparams: Hparams, factor: float, hp_config: HyperparameterConfig) -> Hparams:
    """Multiply the lr by a factor and clamp it to its range, if it has one."""
    # The lr of a long line of copies would otherwise reach 0, which is not a valid lr.
    new = max(hparams.lr * factor, LEAST_LR)
    if "lr" in hp_config.names():
        new = hp_config["lr"].clip(new)
    return hparams.replace(lr=new)


def step(hparams: Hparams, name: str, parameter: RLParameter, draw: float) -> Hparams:
    """Move a hyperparameter or a clip end by a factor; return the new hyperparameters.

    For an end, `parameter` is the range of the end, not of its distance from 1. Ends and decay
    rates move by their distance from 1. `draw` is a uniform number in [0, 1).
    """
    if name in CLIP_ENDS:
        return _step_clip_end(hparams, name, parameter, draw)
    value = value_of(hparams, name, parameter)
    return put(hparams, {name: moved(name, parameter, value, draw)}, {name: parameter})


def between(
    hparams: Hparams, name: str, parameter: RLParameter, tried: Sequence[Hparams], share: float
) -> Value:
    """Return a value between the nearest tried values below and above the current value.

    The value is at `share`, in (0, 1], of the way from the middle of the gap below the current
    value to the middle of the gap above it, so that values move far while few have been tried. On a
    side without a tried value, the end of the range takes the place of the middle. All this is on
    the scale of `ranges.value_at`.
    """

    def place(values: Hparams) -> float:
        return share_of(name, parameter, cast("float", value_of(values, name, parameter)))

    here, places = place(hparams), [place(other) for other in tried]
    below = max((p for p in places if p < here - _SAME), default=None)
    above = min((p for p in places if p > here + _SAME), default=None)
    low = 0.0 if below is None else (below + here) / 2
    high = 1.0 if above is None else (above + here) / 2
    return placed(name, parameter, low + share * (high - low))


def moved(name: str, parameter: RLParameter, value: Value, draw: float) -> Value:
    """Return a value moved in its range, or among its choices; see `RLParameter.step`."""
    distance = distance_range(name, parameter)
    if distance is None or isinstance(value, str):
        return parameter.step(value, draw)
    return from_distance(name, parameter, cast("float", distance.step(abs(value - 1), draw)))


def _step_clip_end(hparams: Hparams, name: str, end: RLParameter, draw: float) -> Hparams:
    """Move one end of the clip range, in the other direction if low >= high would result."""
    old = hparams.clip_bounds[CLIP_ENDS.index(name)]
    other_way = 0.0 if draw >= end.grow_probability else end.grow_probability
    for attempt in (draw, other_way):
        new = cast("float", moved(name, end, old, attempt))
        if new != old and in_order(hparams, name, new):
            return hparams.with_value(name, new)
    return hparams


def in_order(hparams: Hparams, name: str, value: Value) -> bool:
    """Return whether a new end of the clip range keeps low < high; True for all other names."""
    if name not in CLIP_ENDS:
        return True
    low, high = hparams.clip_bounds
    new = cast("float", value)
    return new < high if name == "clip_low" else low < new
