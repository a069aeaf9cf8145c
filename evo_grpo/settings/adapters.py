"""Checks of a search over the rank, alpha or layers of adapters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from evo_grpo.schema.group import contradictions
from evo_grpo.schema.hparams import LORA, Hparams, RankAlpha
from evo_grpo.schema.patterns import ALL, matches
from evo_grpo.schema.problems import Path, Problem, below, dotted, nearest, unknown_name
from evo_grpo.schema.search_space import HyperparameterConfig, outside
from evo_grpo.settings.model import LoraSettings, ModelConfig


def adapter_problems(
    model: ModelConfig | None, space: HyperparameterConfig, above: Path
) -> Iterator[Problem]:
    """Yield contradictions between a search over adapters and the settings of adapters.

    Args:
        model: The group `model`; None if the base was given as a module.
        space: The hyperparameters that are searched.
        above: The path of the ranges.
    """
    if model is None or not searched(space):
        return
    for name, text in pattern_problems(space, model.lora, above):
        yield Problem(("model", "lora", name), text)
    yield from _set_problems(model.lora, space, above)


def _set_problems(
    lora: LoraSettings, space: HyperparameterConfig, above: Path
) -> Iterator[Problem]:
    """Yield sets of layers that are searched and not declared, and layers that nobody has."""
    names, at = lora.searched_sets(space), f"{LORA}target_modules"
    for name in names:
        if name not in lora.target_sets:
            text = unknown_name(name, lora.target_sets, "model.lora.target_sets")
            yield Problem((*above, at, "choices"), text)
    given, remedy = names and lora.target_modules != ALL, f"remove it, or {dotted((*above, at))}"
    row = ("target_modules", given, f"none where {at} is searched", remedy)
    yield from below(contradictions(lora, row), "model", "lora")


def missing_layers(
    targets: str | Sequence[str], layers: Collection[str], model: str, excluded: str | Sequence[str]
) -> str:
    """Return what is wrong with a set of layers of a model; empty if it has all of them.

    Args:
        targets: The set, in the form of `target_modules`.
        layers: Full names of the layers of the model that may have an adapter.
        model: The name of the model.
        excluded: `exclude_modules`; empty for none.
    """
    ends = sorted({layer.rpartition(".")[2] for layer in layers})
    if isinstance(targets, str):
        if not any(matches(layer, targets) for layer in layers):
            hint = f"; write [{targets}]" if targets in ends else ""
            return (
                f"expected {ALL}, a list of names, or a regular expression of full names of layers "
                f"of {model}, got {targets!r}, which matches none{hint}"
            )
    else:
        for name in targets:
            if not any(matches(layer, [name]) for layer in layers):
                near = nearest(name, ends)
                hint = f"Did you mean {near!r}?" if near else f"It has {', '.join(ends)}"
                return f"expected layers of {model}, got {name!r}, which it lacks. {hint}"
    if all(matches(layer, excluded) for layer in layers if matches(layer, targets)):
        return f"expected layers beside those of exclude_modules, got {targets}; remove one of both"
    return ""


def pattern_problems(
    space: HyperparameterConfig,
    lora: Any,  # noqa: ANN401 -- LoraSettings, or PEFT's LoraConfig
    above: Path,
) -> Iterator[tuple[str, str]]:
    """Yield the settings that give some layers another rank or alpha, with a sentence."""
    for searching in searched(space)[:1]:
        for name in ("rank_pattern", "alpha_pattern"):
            if found := dict(getattr(lora, name) or {}):
                text = f"expected none where {searching} is searched, got {found}; remove it, or"
                yield name, f"{text} {dotted((*above, searching))}"


def begins_outside(
    space: HyperparameterConfig, adapter: RankAlpha, above: Path
) -> Iterator[tuple[str, str]]:
    """Yield the settings of a run's adapter with which the first agent cannot begin.

    Each has the name of the setting, `r` or `alpha`, and a sentence.
    """
    for found in outside(Hparams().with_scale(space.names(), adapter), space):
        if found.name.startswith(LORA):
            yield found.name.removeprefix(LORA), found.told(dotted((*above, found.name)))


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
