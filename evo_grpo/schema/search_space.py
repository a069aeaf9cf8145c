"""Hyperparameters against the ranges in which they mutate: what lies outside, what cannot act."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import NamedTuple

from evo_grpo.schema.hparams import Hparams, HyperparameterConfig

CLIPS = ("clip_coef", "clip_low", "clip_high")
ROUNDING = 1e-12
"""Slack of a range: 1 - 0.8 is not quite 0.2."""


class Outside(NamedTuple):
    """A value that an agent begins with, outside of the range in which it may mutate.

    Attributes:
        name: The hyperparameter.
        value: Its value; of a pair-valued clip_coef the distance from 1.
        low: Least value of the range.
        high: Greatest value of the range.
    """

    name: str
    value: float
    low: float
    high: float


def outside(hparams: Hparams, hp_config: HyperparameterConfig) -> Iterator[Outside]:
    """Yield what an agent begins with that its own ranges exclude."""
    for name in hp_config.names():
        low, high = hp_config[name].min, hp_config[name].max
        for value in _values(hparams, name):
            if not low - ROUNDING <= value <= high + ROUNDING:
                yield Outside(name, value, low, high)


def dead_clip(hparams: Hparams, hp_config: HyperparameterConfig, prompts: int) -> str | None:
    """Return the clip parameter that mutates without ever acting, None when there is none.

    Args:
        hparams: What agents begin with.
        hp_config: What may mutate.
        prompts: Prompts of a GRPO step.

    Returns:
        Its name, where every optimizer step of every agent sees the policy that sampled its rows,
        so that the ratio is exactly 1.
    """
    clips = [name for name in CLIPS if name in hp_config.names()]
    if not clips:
        return None
    ranges = hp_config.parameters
    epochs = ranges["update_epochs"].max if "update_epochs" in ranges else hparams.update_epochs
    group = ranges["group_size"].max if "group_size" in ranges else hparams.group_size
    batch = ranges["batch_size"].min if "batch_size" in ranges else hparams.batch_size
    one_batch = batch is None or batch >= prompts * group
    return clips[0] if epochs == 1 and one_batch else None


def warn_if_nothing_mutates(rl_hp: float, hp_config: HyperparameterConfig) -> None:
    """Warn where mutations are asked for, by their weight `rl_hp`, and nothing may mutate."""
    if rl_hp > 0 and not hp_config:
        warnings.warn(
            "Mutations: the agents have no hp_config, so nothing mutates; build them with "
            "hp_config=HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-3)), or give "
            "no_mutation=1, rl_hp=0",
            UserWarning,
            stacklevel=3,
        )


def _values(hparams: Hparams, name: str) -> list[float]:
    if name == "clip_coef" and isinstance(hparams.clip_coef, tuple):
        low, high = hparams.clip_coef
        return [1 - low, high - 1]  # the range of clip_coef is that of the distance from 1
    if name == "batch_size":
        return [] if hparams.batch_size is None else [hparams.batch_size]  # None takes all rows
    return [hparams.get(name)]
