"""Chooses the hyperparameters of the first population; some may come from earlier runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.ranges import draw_value, first_parts, latin_hypercube, placed
from evo_grpo.schema.hparams import (
    CLIP_ENDS,
    MUTABLE,
    Hparams,
    Value,
    has_no_order,
    is_of_every_agent,
)
from evo_grpo.schema.problems import Problem, Problems, below, nearest, refuse
from evo_grpo.schema.search_space import CLIPS, HyperparameterConfig, RLParameter, outside
from evo_grpo.seeding import derive, generator

if TYPE_CHECKING:
    import numpy as np

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
    others cover every range evenly, on a log scale if its minimum is above 0. All choices of a
    hyperparameter go to equally many agents, up to a difference of one. A clip pair with low >=
    high is replaced by a random draw.

    `sample`: agent 0 has the values of `first`, and each other agent draws independently.

    A list has one mapping per agent, with the values that differ from `first`.
    """
    first = with_first_choices(first, hp_config)
    refuse(below(start_problems(first, hp_config, size, init), "init"))
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
    """Yield the problems of a list `init`, with their paths in it; other starts have none."""
    if isinstance(init, str | Mapping):
        return
    if len(init) != size:
        text = f"expected one mapping for each of {size} agents, got {len(init)}; `{{}}` stands "
        yield Problem((), f"{text}for an agent with the values of `algorithm`")
    tolerated = set(outside(first, hp_config))
    for index, values in enumerate(init[:size]):
        try:
            hparams = with_values(first, values, hp_config.names())
        except Problems as error:
            yield from error.below(index).problems
            continue
        for violation in outside(hparams, hp_config):
            if violation not in tolerated:
                yield Problem((index, violation.name), violation.told())


def with_first_choices(first: Hparams, hp_config: HyperparameterConfig) -> Hparams:
    """Return `first`, with the first choice where a hyperparameter of names is unset."""
    for name in hp_config.names():
        choices = hp_config[name].choices
        if choices is not None and has_no_order(name) and first.get(name) is None:
            first = first.with_value(name, choices[0])
    return first


def described_start(
    hparams: Sequence[Hparams], first: Hparams, hp_config: HyperparameterConfig, seed: int
) -> Start:
    """Return the `population.init` for which `start_hparams` returns these hyperparameters.

    If a value is outside its range, the setting is "same"; a resumed run reads the values from
    checkpoints.
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
        {name: value for name, value in agent.named().items() if value != default.get(name)}
        for agent in hparams
    ]
    return "same" if any(start_problems(first, hp_config, len(hparams), listed)) else listed


def sample_hparams(
    base: Hparams, hp_config: HyperparameterConfig, rng: np.random.Generator
) -> Hparams:
    """Draw every hyperparameter that may mutate from its range, or from its `start` if it has one.

    Draws are log-uniform, or uniform for choices and a minimum of 0. Ends of a clip pair and decay
    rates are drawn by their distance from 1.
    """
    plain, clip_ends = first_parts(base, hp_config)
    sample = base
    for name, parameter in plain.items():
        sample = sample.with_value(name, draw_value(name, parameter, rng))
    return _draw_clip_pair(sample, clip_ends, rng) if clip_ends else sample


def spread(
    first: Hparams, hp_config: HyperparameterConfig, count: int, rng: np.random.Generator
) -> Iterator[Hparams]:
    """Yield hyperparameters on a Latin hypercube over all ranges, with choices spread evenly."""
    plain, clip_ends = first_parts(first, hp_config)
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
        hparams = first
        for (name, parameter), share in zip(plain.items(), shares, strict=False):
            value = (
                places[name][math.ceil(share * count) - 1]
                if name in places
                else placed(name, parameter, share)
            )
            hparams = hparams.with_value(name, value)
        yield _clip_pair_at(hparams, clip_ends, row[len(plain) :], rng) if clip_ends else hparams


def _places(
    choices: Sequence[Value], first: Value | None, count: int, rng: np.random.Generator
) -> list[Value]:
    """Return `count` choices in random order, evenly spread if agent 0's `first` is counted too."""
    shuffled = [choices[index] for index in rng.permutation(len(choices)).tolist()]
    order = [c for c in shuffled if c == first] + [c for c in shuffled if c != first]
    begin = 1 if first in choices else 0
    return [order[place % len(order)] for place in range(begin, begin + count)]


def _clip_pair_at(
    base: Hparams,
    clip_ends: Mapping[str, RLParameter],
    shares: Sequence[float],
    rng: np.random.Generator,
) -> Hparams:
    """Set the clip pair at shares of the ranges of its ends; draw it at random if low >= high."""
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
    """Return `first` with the `values` replaced, which are given by name.

    Reward weights can be replaced only if `first` or `searched` has them. The same holds for
    settings of the run in which agents may differ, such as a prompt or a LoRA rank.
    """
    of_every_agent = filter(is_of_every_agent, MUTABLE)
    names = dict.fromkeys((*of_every_agent, *first.named(), *searched))
    for name in values:
        if name not in names:
            near = nearest(name, names)
            begin = f"did you mean {near!r}? Expected" if near else "expected"
            text = f"unknown key; {begin} one of: {', '.join(names)}"
            raise Problems.one(text, name)
    ends = {name: values[name] for name in CLIP_ENDS if name in values}
    if ends and "clip_coef" in values:
        text = "expected clip_coef alone, or clip_low and clip_high, got both; remove one"
        raise Problems.one(text, "clip_coef")
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
    except Problems as error:
        raise Problems(*(Problem((next(iter(ends)),), p.text) for p in error.problems)) from None


def starts_with(
    first: Hparams,
    hp_config: HyperparameterConfig,
    size: int,
    earlier: Sequence[Hparams],
    seed: int,
) -> list[dict[str, Any]]:
    """Return `population.init` as a list of mappings, one for each of `size` agents.

    Agent 0 has the values of `first`, so its mapping is empty. The next agents, at most half of
    all, have the values in `earlier`, best first. The others cover the ranges evenly. Each mapping
    but the first has all values that may mutate.
    """
    best = [agent for agent in dict.fromkeys(earlier) if agent != first][: size // 2]
    others = spread(first, hp_config, size - 1 - len(best), generator(seed, "init"))
    return [{}, *(_listed(agent, hp_config) for agent in (*best, *others))]


def carried_over(
    earlier: Hparams, names: Collection[str], first: Hparams, hp_config: HyperparameterConfig
) -> Hparams:
    """Return `first` with the values that an agent of an earlier run has for `names`.

    The hyperparameters `names` mutate in both runs. A number outside its range is replaced by the
    nearest end or choice. A name that is none of the choices is ignored.
    """
    hparams = first
    for name in (key for key in names if key not in CLIPS):
        value, parameter = earlier.get(name), hp_config[name]
        if value is None or (isinstance(value, str) and not parameter.allows(value)):
            continue
        new = value if isinstance(value, str) else parameter.clip(value)
        hparams = hparams.with_value(name, new)
    return _with_clip(hparams, earlier, hp_config) if set(names) & set(CLIPS) else hparams


def in_both(names: Collection[str], hp_config: HyperparameterConfig) -> list[str]:
    """Return the searched hyperparameters that are in `names`; all clip names count as the same."""
    clips = bool(set(names) & set(CLIPS))
    return [name for name in hp_config.names() if name in names or (name in CLIPS and clips)]


def _with_clip(hparams: Hparams, earlier: Hparams, hp_config: HyperparameterConfig) -> Hparams:
    """Return `hparams` with the clip range of an earlier run's agent, clamped to `hp_config`."""
    if "clip_coef" in hp_config.names():
        parameter = hp_config["clip_coef"]
        if not isinstance(earlier.clip_coef, tuple) and not isinstance(hparams.clip_coef, tuple):
            return hparams.replace(clip_coef=parameter.clip(earlier.clip_coef))
        low, high = earlier.clip_bounds
        return hparams.replace(
            clip_coef=(1 - parameter.clip(1 - low), 1 + parameter.clip(high - 1))
        )
    bounds = dict(zip(CLIP_ENDS, hparams.clip_bounds, strict=True))
    for name, value in zip(CLIP_ENDS, earlier.clip_bounds, strict=True):
        if name in hp_config.names():
            bounds[name] = hp_config[name].clip(value)
    low, high = bounds["clip_low"], bounds["clip_high"]
    return hparams.replace(clip_coef=(low, high)) if low < high else hparams


def _listed(hparams: Hparams, hp_config: HyperparameterConfig) -> dict[str, Any]:
    values = {name: hparams.get(name) for part in first_parts(hparams, hp_config) for name in part}
    return {name: value for name, value in values.items() if value is not None}
