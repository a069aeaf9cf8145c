"""Hyperparameters of the agents of the first population."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.distance import distance_range, end_of_distance, from_distance
from evo_grpo.schema.hparams import (
    CLIP_ENDS,
    MUTABLE,
    Hparams,
    Value,
    has_no_order,
    is_of_every_agent,
)
from evo_grpo.schema.problems import Problem, Problems, nearest
from evo_grpo.schema.search_space import outside
from evo_grpo.seeding import derive, generator

if TYPE_CHECKING:
    import numpy as np

    from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

StartName = Literal["latin_hypercube", "sample", "same"]
Start = StartName | Sequence[Mapping[str, Any]] | Mapping[str, Sequence[str]]
"""The setting `population.init`: a method by name, one mapping of values per agent, or `{from:
[RUN, ...]}`, which `record/history.py` replaces by a list before any agent is made."""

_ATTEMPTS = 1000  # redraws until low < high, where the ranges of the clip bounds overlap


def start_hparams(
    first: Hparams, hp_config: HyperparameterConfig, size: int, init: Start, seed: int
) -> list[Hparams]:
    """Return the hyperparameters of each of `size` agents of the first population.

    `same`: all agents have the values of `first`.

    `latin_hypercube` (McKay, Beckman & Conover 1979): agent 0 has the values of `first`, and the
    others cover every range evenly. Each range is cut into N - 1 strata of equal length, on a log
    scale if its minimum is above 0. Each stratum holds the value of exactly one agent, in a random
    order per hyperparameter. Each choice goes to the same number of agents, or to one more. A clip
    pair with low >= high is drawn at random instead.

    `sample`: agent 0 has the values of `first`, and each other agent draws independently.

    A list has one mapping per agent, with the values that differ from `first`. If a range has a
    `start`, values are drawn from it instead of the whole range.
    """
    first = with_first_choices(first, hp_config)
    if found := list(start_problems(first, hp_config, size, init)):
        raise Problems(*found).below("init")
    if isinstance(init, Mapping):
        raise ConfigError(f"init: expected the settings of earlier runs in a list, got {init}")
    if not isinstance(init, str):
        return [with_values(first, values, hp_config.names()) for values in init]
    if init == "same":
        return [first] * size
    if init == "sample":
        streams = (generator(derive(seed, "init", index)) for index in range(1, size))
        return [first, *(sample_hparams(first, hp_config, rng) for rng in streams)]
    return [first, *spread(first, hp_config, size - 1, generator(seed, "init"))]


def start_problems(
    first: Hparams, hp_config: HyperparameterConfig, size: int, init: Start
) -> Iterator[Problem]:
    """Yield the problems of a list of starts, with paths below it; other starts have none."""
    if isinstance(init, str | Mapping):
        return
    if len(init) != size:
        text = f"expected one mapping for each of {size} agents, got {len(init)}; `{{}}` stands "
        yield Problem((), f"{text}for an agent with the values of `algorithm`")
    known = set(outside(first, hp_config))
    for index, values in enumerate(init[:size]):
        try:
            hparams = with_values(first, values, hp_config.names())
        except Problems as problems:
            yield from problems.below(index).found
            continue
        for one in outside(hparams, hp_config):
            if one not in known:
                yield Problem((index, one.name), one.told())


def with_first_choices(first: Hparams, hp_config: HyperparameterConfig) -> Hparams:
    """Return hyperparameters with the first choice of each name that has no value."""
    for name in hp_config.names():
        choices = hp_config[name].choices
        if choices is not None and has_no_order(name) and first.get(name) is None:
            first = first.with_value(name, choices[0])
    return first


def described_start(
    hparams: Sequence[Hparams], first: Hparams, hp_config: HyperparameterConfig, seed: int
) -> Start:
    """Return a setting for which `start_hparams` returns these hyperparameters.

    It is "same" if a value is outside its range; a resume reads values from checkpoints anyway.
    """
    names: tuple[StartName, ...] = ("same", "latin_hypercube", "sample")
    for name in names:
        try:
            if start_hparams(first, hp_config, len(hparams), name, seed) == list(hparams):
                return name
        except ConfigError:  # the ranges allow no clip pair
            continue
    default = first.named()
    listed = [
        {name: value for name, value in one.named().items() if value != default.get(name)}
        for one in hparams
    ]
    return "same" if any(start_problems(first, hp_config, len(hparams), listed)) else listed


def sample_hparams(
    base: Hparams, hp_config: HyperparameterConfig, rng: np.random.Generator
) -> Hparams:
    """Draw every hyperparameter that may mutate from its range, or from its `start` if it has one.

    Draws are log-uniform, or uniform for choices and a minimum of 0. Ends of a clip pair and decay
    rates are drawn by their distance from 1.
    """
    plain, clip_ends = parts_of(base, hp_config)
    drawn = base
    for name, parameter in plain.items():
        drawn = drawn.with_value(name, draw_value(name, parameter, rng))
    return _draw_clip_pair(drawn, clip_ends, rng) if clip_ends else drawn


def latin_hypercube(rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Return points of a Latin hypercube, an array (rows, columns) of floats in (0, 1].

    In each column, each stratum (i / rows, (i + 1) / rows] holds exactly one value.
    """
    import numpy as np  # slow to import, and planning a run draws nothing

    strata = np.stack([rng.permutation(rows) for _ in range(columns)], axis=1)
    # In (0, 1], so that a range that begins at 0 yields no 0: lr and clip_coef could not take it.
    return (strata + 1.0 - rng.random((rows, columns))) / rows


def draw_value(name: str, parameter: RLParameter, rng: np.random.Generator) -> Value:
    """Draw a choice or a value from a range; all integers of a range are equally likely."""
    if parameter.choices is not None:
        return parameter.choices[int(rng.integers(len(parameter.choices)))]
    measure = distance_range(name, parameter) or parameter
    if measure.dtype == "int" and measure.min == 0:
        return int(rng.integers(0, math.floor(measure.max) + 1))
    return placed(name, parameter, 1.0 - rng.random())


def placed(name: str, parameter: RLParameter, share: float) -> float:
    """Return the value of a hyperparameter at a share of its range; see `value_at`."""
    distance = distance_range(name, parameter)
    if distance is None:
        return value_at(parameter, share)
    return from_distance(name, parameter, value_at(distance, share))


def value_at(parameter: RLParameter, share: float) -> float:
    """Return the value at a share in (0, 1] of a range, by the logarithm if that begins above 0."""
    low, high = parameter.min, parameter.max
    if parameter.dtype == "int":
        if low == 0:
            return math.ceil(share * (math.floor(high) + 1)) - 1
        low, high = low - 0.5, high + 0.5
    if low > 0:
        return parameter.clip(math.exp(math.log(low) + share * (math.log(high) - math.log(low))))
    return parameter.clip(low + share * (high - low))


def share_of(name: str, parameter: RLParameter, value: float) -> float:
    """Return the share of its range at which a value lies, the inverse of `placed`."""
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


def spread(
    first: Hparams, hp_config: HyperparameterConfig, count: int, rng: np.random.Generator
) -> Iterator[Hparams]:
    """Yield `count` agents on a Latin hypercube over all ranges, with choices spread evenly."""
    plain, clip_ends = parts_of(first, hp_config)
    if not plain and not clip_ends:
        yield from [first] * count
        return
    places = {
        name: _places(parameter.choices, first.get(name), count, rng)
        for name, parameter in plain.items()
        if parameter.choices is not None
    }
    for row in latin_hypercube(count, len(plain) + len(clip_ends), rng).tolist():
        shares = iter(row)
        drawn = first
        for (name, parameter), share in zip(plain.items(), shares, strict=False):
            value = (
                places[name][math.ceil(share * count) - 1]
                if name in places
                else placed(name, parameter, share)
            )
            drawn = drawn.with_value(name, value)
        yield _clip_pair_at(drawn, clip_ends, row[len(plain) :], rng) if clip_ends else drawn


def _places(
    choices: Sequence[Value], first: Value | None, count: int, rng: np.random.Generator
) -> list[Value]:
    """Return choices for `count` agents, evenly over them and the first; the rest is drawn."""
    drawn = [choices[index] for index in rng.permutation(len(choices)).tolist()]
    order = [one for one in drawn if one == first] + [one for one in drawn if one != first]
    begin = 1 if first in choices else 0
    return [order[place % len(order)] for place in range(begin, begin + count)]


def parts_of(
    base: Hparams, hp_config: HyperparameterConfig
) -> tuple[dict[str, RLParameter], dict[str, RLParameter]]:
    """Return the ranges of single values, and those of the two ends of a clip pair, by name."""
    plain: dict[str, RLParameter] = {}
    clip_ends: dict[str, RLParameter] = {}
    for name in hp_config.names():
        parameter = hp_config[name].first
        if name in CLIP_ENDS:
            clip_ends[name] = parameter
        elif name == "clip_coef" and isinstance(base.clip_coef, tuple):
            clip_ends = {end: end_of_distance(end, parameter) for end in CLIP_ENDS}
        else:
            plain[name] = parameter
    return plain, clip_ends


def _clip_pair_at(
    base: Hparams,
    clip_ends: Mapping[str, RLParameter],
    shares: Sequence[float],
    rng: np.random.Generator,
) -> Hparams:
    """Return the clip pair at shares of the ranges of its ends, or a random one if low >= high."""
    pair: dict[str, float] = dict(zip(CLIP_ENDS, base.clip_bounds, strict=True))
    for (name, end), share in zip(clip_ends.items(), shares, strict=True):
        pair[name] = placed(name, end, share)
    low, high = pair["clip_low"], pair["clip_high"]
    return (
        base.replace(clip_coef=(low, high)) if low < high else _draw_clip_pair(base, clip_ends, rng)
    )


def _draw_clip_pair(
    base: Hparams, clip_ends: Mapping[str, RLParameter], rng: np.random.Generator
) -> Hparams:
    for _ in range(_ATTEMPTS):
        low, high = base.clip_bounds
        if "clip_low" in clip_ends:
            low = cast("float", draw_value("clip_low", clip_ends["clip_low"], rng))
        if "clip_high" in clip_ends:
            high = cast("float", draw_value("clip_high", clip_ends["clip_high"], rng))
        if low < high:
            return base.replace(clip_coef=(low, high))
    ranges = ", ".join(f"{end} in [{p.min}, {p.max}]" for end, p in clip_ends.items())
    raise ConfigError(
        f"clip_coef: expected ranges that leave room for low < high, got {ranges} beside "
        f"{base.clip_coef!r}"
    )


def with_values(first: Hparams, values: Mapping[str, Any], searched: Iterable[str] = ()) -> Hparams:
    """Return hyperparameters with some values replaced, by name.

    Reward weights, and values in place of a setting of the run, such as a prompt or a rank, can be
    set if `first` has them or if they are in `searched`.
    """
    own = filter(is_of_every_agent, MUTABLE)
    known = dict.fromkeys((*own, *first.named(), *searched))
    for name in values:
        if name not in known:
            near = nearest(name, known)
            begin = f"did you mean {near!r}? Expected" if near else "expected"
            text = f"unknown key; {begin} one of: {', '.join(known)}"
            raise Problems(Problem((name,), text))
    ends = {name: values[name] for name in CLIP_ENDS if name in values}
    if ends and "clip_coef" in values:
        text = "expected clip_coef alone, or clip_low and clip_high, got both; remove one"
        raise Problems(Problem(("clip_coef",), text))
    dotted = {n: v for n, v in values.items() if "." in n}
    fields = {name: v for name, v in values.items() if name not in ends | dotted}
    hparams = first.replace(**fields)
    for name, value in dotted.items():
        hparams = hparams.with_value(name, value)
    if not ends:
        return hparams
    pair = dict(zip(CLIP_ENDS, hparams.clip_bounds, strict=True)) | ends
    try:
        return hparams.replace(clip_coef=(pair["clip_low"], pair["clip_high"]))
    except Problems as problems:
        raise Problems(*(Problem((next(iter(ends)),), p.text) for p in problems.found)) from None
