"""Checks of a search over the rank or alpha of adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from evo_grpo.schema.hparams import LORA, Hparams, RankAlpha
from evo_grpo.schema.outside import outside
from evo_grpo.schema.problems import Path, Problem
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.settings.engine import EngineConfig
from evo_grpo.settings.model import ModelConfig


class Patterns(Protocol):
    """The settings of an adapter, here or of PEFT, that give some layers another rank or alpha."""

    @property
    def rank_pattern(self) -> Mapping[str, Any] | None:
        """Ranks of some layers."""
        ...

    @property
    def alpha_pattern(self) -> Mapping[str, Any] | None:
        """Alphas of some layers."""
        ...


def adapter_problems(
    model: ModelConfig | None, space: HyperparameterConfig, engine: EngineConfig, above: Path
) -> Iterator[Problem]:
    """Yield contradictions between a search over rank or alpha and the settings of adapters.

    Args:
        model: The group `model`; None if the base was given as a module.
        space: The hyperparameters that are searched.
        engine: The group `engine`.
        above: The path of the ranges.
    """
    names = searched(space)
    if not names:
        return
    where = ".".join(map(str, (*above, names[0])))
    if engine.zero is not None:
        text = (
            f"expected null where {names[0]} is searched, since all agents train through one "
            f"adapter of DeepSpeed's, got {engine.zero}; leave it out, or remove {where}"
        )
        yield Problem(("engine", "zero"), text)
    if model is None:
        return
    for name, text in pattern_problems(space, model.lora, above):
        yield Problem(("model", "lora", name), text)


def pattern_problems(
    space: HyperparameterConfig, lora: Patterns, above: Path
) -> Iterator[tuple[str, str]]:
    """Yield the settings that give some layers another rank or alpha, with a sentence."""
    for searching in searched(space)[:1]:
        where = ".".join(map(str, (*above, searching)))
        for name in ("rank_pattern", "alpha_pattern"):
            if found := dict(getattr(lora, name) or {}):
                text = (
                    f"expected none where {searching} is searched, which has one value for all "
                    f"layers, got {found}; leave it out, or remove {where}"
                )
                yield name, text


def begins_outside(
    space: HyperparameterConfig, adapter: RankAlpha, above: Path
) -> Iterator[tuple[str, str]]:
    """Yield the settings of a run's adapter with which the first agent cannot begin.

    Each has the name of the setting, `r` or `alpha`, and a sentence.
    """
    for found in outside(Hparams().with_scale(space.names(), adapter), space):
        if found.name.startswith(LORA):
            where = ".".join(map(str, (*above, found.name)))
            text = f"expected {found.parameter.expected(where)}, got {found.shown}; {found.remedy}"
            yield found.name.removeprefix(LORA), text


def too_wide(space: HyperparameterConfig, layer: str, width: int) -> str:
    """Return why a rank in the range is too large for the narrowest layer; empty if none is."""
    name = f"{LORA}r"
    text = above_width(space[name].max, layer, width) if name in space.names() else ""
    remedy = "lower max" if text and space[name].choices is None else "remove it"
    return f"{text}; {remedy}" if text else ""


def above_width(rank: float, layer: str, width: int) -> str:
    """Return why a rank is too large for the narrowest layer, without a remedy; empty if it fits.

    Args:
        rank: The rank.
        layer: The narrowest layer with an adapter.
        width: The smaller one of its numbers of inputs and outputs.
    """
    if rank <= width:
        return ""
    return (
        f"expected ranks of at most {width}, the width of the narrowest layer with an adapter, "
        f"{layer}, got {rank:g}; PEFT takes a larger one, which adds parameters and no function"
    )


def searched(space: HyperparameterConfig) -> list[str]:
    """Return the settings of adapters that are searched."""
    return [name for name in space.names() if name.startswith(LORA)]
