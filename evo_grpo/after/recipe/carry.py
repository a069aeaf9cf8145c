"""What changes when the values of a run are used with another model: lr, modules and groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from evo_grpo.errors import ConfigError
from evo_grpo.settings import RunConfig
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS, DEFAULT_PROMPTS
from evo_grpo.training.sizing.fit import Fit, dtypes, fit_on
from evo_grpo.training.sizing.gpus import Gpu
from evo_grpo.training.sizing.model_size import ModelSize, adapted_layers
from evo_grpo.training.sizing.planning import check_adapters_fit, cuda_devices

EXPONENT = 0.5
"""lr is proportional to the width of the model to minus this power.

The first matrix of an adapter, A, sums over the width n: after steps of size lr, it adds about
lr * n to what the second one, B, multiplies by about lr. Their product, lr^2 * n, stays the same if
lr is proportional to n^-1/2 (Hayou et al. 2024, arXiv:2406.08447, for A random and B zero).
"""


class Carried(NamedTuple):
    """The learning rate of a model of another width.

    Attributes:
        factor: Factor on every lr; 1 if it stays.
        why: The factor in words, for the file.
        unknown: Why the factor is unknown; empty if it is known.
    """

    factor: float
    why: str
    unknown: str = ""


def carried_lr(old: ModelSize, new: ModelSize) -> Carried:
    """Return the factor on lr from the widths of two models."""
    for size in (old, new):
        if size.shape is None:
            text = f"as in the run: the width of {size.name} is unknown ({size.note})"
            return Carried(1.0, text, text)
    assert old.shape is not None, "checked above"
    assert new.shape is not None, "checked above"
    before, after = old.shape.hidden, new.shape.hidden
    if before == after:
        return Carried(1.0, f"as in the run: both models are {after} wide")
    factor = (before / after) ** EXPONENT
    return Carried(
        factor,
        f"times {factor:.3g} = ({before} / {after})^{EXPONENT:g}, by the widths of {old.name} and "
        f"{new.name}",
    )


def check_modules(config: RunConfig, old: ModelSize, new: ModelSize) -> None:
    """Refuse a model that lacks modules which the run's adapters train, as far as it is known.

    With `all-linear`, an adapter trains the linear layers of any model.

    Raises:
        ConfigError: The model lacks one, a rank that is searched is above the width of a layer, or
            the run started from an adapter.
    """
    if config.model.adapter is not None:
        raise ConfigError(
            f"--model: expected a run whose agents start from their base, got model.adapter "
            f"{config.model.adapter}, which fits only {old.name}; leave --model out, and set "
            "model.name, model.adapter and algorithm.lr in the recipe"
        )
    if not new.linears:
        return
    targets = config.model.lora.target_modules
    if targets == "all-linear":
        check_adapters_fit(config, new)
        return
    wanted = _ends(adapted_layers(old, config.model.lora)) if old.linears else set[str]()
    if isinstance(targets, list) and not wanted:
        wanted = _ends(targets)
    has = _ends(new.linears)
    if missing := sorted(wanted - has):
        raise ConfigError(
            f"--model: expected one with the modules that the run's adapters train, "
            f"{', '.join(sorted(wanted))} (model.lora.target_modules), got {new.name}, which lacks "
            f"{', '.join(missing)} and has {', '.join(sorted(has))}; name a model of the family "
            f"of {old.name}, or search with target_modules: all-linear"
        )
    adapted_layers(new, config.model.lora)  # refuses a pattern that matches nothing
    check_adapters_fit(config, new)


def _ends(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


class Fitted(NamedTuple):
    """A run with groups that fit into a memory.

    Attributes:
        config: The settings.
        fit: Whether it fits; None if that is unknown.
        lowered: The group size before; None if it stays.
    """

    config: RunConfig
    fit: Fit | None
    lowered: int | None = None


def with_groups_that_fit(config: RunConfig, size: ModelSize, gpu: Gpu | None) -> Fitted:
    """Halve the group size until the run fits into the memory of the device.

    The completions of one prompt are decoded together, so a group is the least that a device has to
    hold. Prompts per step double with each halving, so that a step samples as much. A group size
    that is searched stays, and so does one that fits in no size.

    Args:
        config: The settings of the run.
        size: The size of its model.
        gpu: The card to plan for; None for the devices of this machine.
    """
    on, devices = dtypes(config, gpu), cuda_devices()
    longest = config.algorithm.longest_output(config.search_space()) or DEFAULT_OUTPUT_TOKENS

    def fit_of(one: RunConfig, *, proposes: bool = False) -> Fit | None:
        return fit_on(one, size, longest, on, gpu, devices, proposes=proposes)

    first = fit_of(config)
    if first is None or first.fits:
        return Fitted(config, first)
    prompts = config.algorithm.prompts_per_step or DEFAULT_PROMPTS
    searched = "group_size" in config.search_space().names()
    group = 1 if searched else config.algorithm.group_size
    while group % 2 == 0 and group > 2:
        group, prompts = group // 2, prompts * 2
        algorithm = config.algorithm.replace(group_size=group, prompts_per_step=prompts)
        tried = config.replace(algorithm=algorithm)
        found = fit_of(tried)
        if found is not None and found.fits:
            return Fitted(tried, found, config.algorithm.group_size)
    return Fitted(config, fit_of(config, proposes=True))
