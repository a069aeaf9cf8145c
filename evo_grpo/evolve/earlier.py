"""Start agents of a run with hyperparameters of agents of earlier runs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evo_grpo.evolve.start import parts_of, spread
from evo_grpo.schema.hparams import CLIP_ENDS, Hparams
from evo_grpo.schema.search_space import CLIPS
from evo_grpo.seeding import generator

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter


def starts_with(
    first: Hparams,
    hp_config: HyperparameterConfig,
    size: int,
    found: Sequence[Hparams],
    seed: int,
) -> list[dict[str, Any]]:
    """Return `population.init` as a list, half of which is found and the rest drawn.

    Agent 0 has the values of `first`. The next agents, up to half of all, have those in `found`,
    best first and inside the ranges. The others cover the ranges evenly; see `start_hparams`. Each
    mapping has all values that may mutate, so that it does not depend on the earlier runs.
    """
    best = [one for one in dict.fromkeys(found) if one != first][: size // 2]
    drawn = spread(first, hp_config, size - 1 - len(best), generator(seed, "init"))
    return [{}, *(_listed(one, hp_config) for one in (*best, *drawn))]


def carried_over(
    earlier: Hparams, names: Collection[str], first: Hparams, hp_config: HyperparameterConfig
) -> Hparams:
    """Return `first` with those values of an earlier agent that may mutate in both runs.

    A number outside its range moves to the nearest end or choice. A name, or true or false, that is
    none of the choices is left out.
    """
    found = first
    for name in (one for one in names if one not in CLIPS):
        value, parameter = earlier.get(name), hp_config[name]
        is_name = isinstance(value, str | bool)  # true and false have no nearest choice
        if value is None or (is_name and not parameter.allows(value)):
            continue
        found = found.with_value(name, value if is_name else parameter.clip(value))
    return _with_clip(found, earlier, hp_config) if set(names) & set(CLIPS) else found


def in_both(names: Collection[str], hp_config: HyperparameterConfig) -> list[str]:
    """Return those hyperparameters of `names` that a run also has; all clip forms count as one."""
    clips = bool(set(names) & set(CLIPS))
    return [one for one in hp_config.names() if one in names or (one in CLIPS and clips)]


def _with_clip(found: Hparams, earlier: Hparams, hp_config: HyperparameterConfig) -> Hparams:
    """Return hyperparameters with the clip range of an earlier agent, moved into its range."""
    if "clip_coef" in hp_config.names():
        own = hp_config["clip_coef"]
        if not isinstance(earlier.clip_coef, tuple) and not isinstance(found.clip_coef, tuple):
            return found.replace(clip_coef=own.clip(earlier.clip_coef))
        low, high = earlier.clip_bounds
        return found.replace(clip_coef=(1 - own.clip(1 - low), 1 + own.clip(high - 1)))
    bounds = dict(zip(CLIP_ENDS, found.clip_bounds, strict=True))
    for name, value in zip(CLIP_ENDS, earlier.clip_bounds, strict=True):
        if name in hp_config.names():
            bounds[name] = hp_config[name].clip(value)
    low, high = bounds["clip_low"], bounds["clip_high"]
    return found.replace(clip_coef=(low, high)) if low < high else found


def _listed(hparams: Hparams, hp_config: HyperparameterConfig) -> dict[str, Any]:
    parts: tuple[dict[str, RLParameter], ...] = parts_of(hparams, hp_config)
    values = {name: hparams.get(name) for part in parts for name in part}
    return {name: value for name, value in values.items() if value is not None}
