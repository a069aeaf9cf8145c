"""The hyperparameters that the agents of the first population begin with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.clip_ends import distance_of_end, end_of_distance, from_distance
from evo_grpo.schema.hparams import CLIP_ENDS, MUTABLE, Hparams
from evo_grpo.schema.problems import Problem, Problems, nearest
from evo_grpo.schema.search_space import outside
from evo_grpo.seeding import derive, generator

if TYPE_CHECKING:
    import numpy as np

    from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

StartName = Literal["latin_hypercube", "sample", "same"]
Start = StartName | Sequence[Mapping[str, Any]]
"""How a population begins: by a name, or one mapping of values per agent."""

_ATTEMPTS = 1000  # overlapping ranges of clip_low and clip_high are drawn until low < high


def start_hparams(
    first: Hparams, hp_config: HyperparameterConfig, size: int, init: Start, seed: int
) -> list[Hparams]:
    """Return what each of `size` agents of the first population begins with.

    `latin_hypercube` (McKay, Beckman & Conover 1979): agent 0 keeps its values, and the N - 1
    others cover every range evenly. Each range is cut into N - 1 strata of equal length, in the
    logarithm where its least value is above 0, and each stratum holds the value of exactly one
    agent, in an order of its own for each hyperparameter. Clip pairs that would be out of order,
    since their ranges overlap, are drawn at random instead.

    `sample`: all but the first draw independently. A list has N mappings of the values that differ
    from `first`, which the settings say. `start` of a range takes the place of its bounds.

    Raises:
        ConfigError: A list has another length, an unknown name or a value that no agent could train
            with; or the ranges of clip_low and clip_high leave no low < high.
    """
    if found := list(start_problems(first, hp_config, size, init)):
        raise Problems(*found).below("init")
    if not isinstance(init, str):
        return [with_values(first, values) for values in init]
    if init == "same":
        return [first] * size
    if init == "sample":
        streams = (generator(derive(seed, "init", index)) for index in range(1, size))
        return [first, *(sample_hparams(first, hp_config, rng) for rng in streams)]
    return [first, *_spread(first, hp_config, size - 1, generator(seed, "init"))]


def start_problems(
    first: Hparams, hp_config: HyperparameterConfig, size: int, init: Start
) -> Iterator[Problem]:
    """Yield what is wrong with a list of starts, by paths below it; a name has no problems."""
    if isinstance(init, str):
        return
    if len(init) != size:
        text = f"expected one mapping for each of {size} agents, got {len(init)}; `{{}}` stands "
        yield Problem((), f"{text}for an agent with the values of `algorithm`")
    known = set(outside(first, hp_config))
    for index, values in enumerate(init[:size]):
        try:
            hparams = with_values(first, values)
        except Problems as problems:
            yield from problems.below(index).found
            continue
        for one in outside(hparams, hp_config):
            if one not in known:
                text = (
                    f"expected a value inside of its range [{one.low:g}, {one.high:g}], got "
                    f"{one.value:g}; move it, or widen the range"
                )
                yield Problem((index, one.name), text)


def described_start(
    hparams: Sequence[Hparams], first: Hparams, hp_config: HyperparameterConfig, seed: int
) -> Start:
    """Return the setting that `start_hparams` makes these hyperparameters of.

    Values outside of their ranges, which no setting may hold, are described as "same": a run that
    is resumed takes its agents' values from checkpoints.
    """
    names: tuple[StartName, ...] = ("same", "latin_hypercube", "sample")
    for name in names:
        try:
            if start_hparams(first, hp_config, len(hparams), name, seed) == list(hparams):
                return name
        except ConfigError:  # ranges that nothing can be drawn from
            continue
    default = first.to_dict()
    listed = [
        {name: value for name, value in one.to_dict().items() if value != default[name]}
        for one in hparams
    ]
    return "same" if any(start_problems(first, hp_config, len(hparams), listed)) else listed


def sample_hparams(
    base: Hparams, hp_config: HyperparameterConfig, rng: np.random.Generator
) -> Hparams:
    """Draw every hyperparameter that may mutate from its range, for the first population.

    The draw is uniform in the logarithm; where the least value is 0, which has none, it is uniform
    in the value. Ends of a clip pair are drawn by their distance from 1, as they mutate. `start` of
    a range takes the place of its bounds.

    Raises:
        ConfigError: When the ranges of clip_low and clip_high leave no low < high.
    """
    plain, clip_ends = _parts(base, hp_config)
    drawn = base
    for name, parameter in plain.items():
        drawn = drawn.with_value(name, draw(parameter, rng))
    return _draw_clip_pair(drawn, clip_ends, rng) if clip_ends else drawn


def latin_hypercube(rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Return points of a Latin hypercube, an array (rows, columns) of floats in (0, 1].

    Of each column, row i of some order lies in the stratum (i / rows, (i + 1) / rows].
    """
    import numpy as np  # slow to load, and what only plans a run draws nothing

    strata = np.stack([rng.permutation(rows) for _ in range(columns)], axis=1)
    # In (0, 1], so that a range that begins at 0 yields no 0: lr and clip_coef could not take it.
    return (strata + 1.0 - rng.random((rows, columns))) / rows


def draw(parameter: RLParameter, rng: np.random.Generator) -> float:
    """Draw from a range; an int's ends get the same share as the values between."""
    if parameter.dtype == "int" and parameter.min == 0:
        return int(rng.integers(0, math.floor(parameter.max) + 1))
    return value_at(parameter, 1.0 - rng.random())


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


def _spread(
    first: Hparams, hp_config: HyperparameterConfig, count: int, rng: np.random.Generator
) -> Iterator[Hparams]:
    """Yield the agents on a Latin hypercube over all ranges."""
    plain, clip_ends = _parts(first, hp_config)
    if not plain and not clip_ends:
        yield from [first] * count
        return
    for row in latin_hypercube(count, len(plain) + len(clip_ends), rng).tolist():
        shares = iter(row)
        drawn = first
        for (name, parameter), share in zip(plain.items(), shares, strict=False):
            drawn = drawn.with_value(name, value_at(parameter, share))
        yield _clip_pair_at(drawn, clip_ends, row[len(plain) :], rng) if clip_ends else drawn


def _parts(
    base: Hparams, hp_config: HyperparameterConfig
) -> tuple[dict[str, RLParameter], dict[str, RLParameter]]:
    """Divide what may mutate into single values and the ends of a clip pair, to be drawn anew."""
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
    """Return the pair at shares of the ranges of its ends; drawn at random if out of order."""
    pair: dict[str, float] = dict(zip(CLIP_ENDS, base.clip_bounds, strict=True))
    for (name, end), share in zip(clip_ends.items(), shares, strict=True):
        distance = distance_of_end(name, end)
        pair[name] = (
            value_at(end, share)
            if distance is None
            else from_distance(name, end, value_at(distance, share))
        )
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
            low = draw_clip_end("clip_low", clip_ends["clip_low"], rng)
        if "clip_high" in clip_ends:
            high = draw_clip_end("clip_high", clip_ends["clip_high"], rng)
        if low < high:
            return base.replace(clip_coef=(low, high))
    ranges = ", ".join(f"{end} in [{p.min}, {p.max}]" for end, p in clip_ends.items())
    raise ConfigError(
        f"clip_coef: expected ranges that leave room for low < high, got {ranges} beside "
        f"{base.clip_coef!r}"
    )


def draw_clip_end(name: str, end: RLParameter, rng: np.random.Generator) -> float:
    """Draw one end of a clip pair, by its distance from 1 where its range holds no 1 inside."""
    distance = distance_of_end(name, end)
    return draw(end, rng) if distance is None else from_distance(name, end, draw(distance, rng))


def with_values(first: Hparams, values: Mapping[str, Any]) -> Hparams:
    """Return hyperparameters with those of a mapping, by the names of `MUTABLE`, in their place.

    Raises:
        Problems: A name is unknown, or a value is none that an agent could train with.
    """
    for name in values:
        if name not in MUTABLE:
            near = nearest(name, MUTABLE)
            hint = f"did you mean {near!r}? " if near else ""
            text = f"unknown key; {hint}Expected one of: {', '.join(MUTABLE)}"
            raise Problems(Problem((name,), text))
    ends = {name: values[name] for name in CLIP_ENDS if name in values}
    if ends and "clip_coef" in values:
        text = "expected clip_coef alone, or clip_low and clip_high, got both; remove one"
        raise Problems(Problem(("clip_coef",), text))
    hparams = first.replace(**{name: v for name, v in values.items() if name not in ends})
    if not ends:
        return hparams
    pair = dict(zip(CLIP_ENDS, hparams.clip_bounds, strict=True)) | ends
    try:
        return hparams.replace(clip_coef=(pair["clip_low"], pair["clip_high"]))
    except Problems as problems:
        raise Problems(*(Problem((next(iter(ends)),), p.text) for p in problems.found)) from None
