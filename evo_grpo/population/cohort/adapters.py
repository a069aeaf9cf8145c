"""The adapter of an agent, which follows the rank, alpha and layers among its hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from evo_grpo.evolve.start import with_first_choices
from evo_grpo.model.lora.configs import module_of, width_of
from evo_grpo.model.lora.load import padded
from evo_grpo.model.lora.resize import resize_slot, with_rank
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.population.cohort.state import AgentState
from evo_grpo.population.zero.turns import ZeroOptimizer
from evo_grpo.schema.hparams import LORA, Hparams, RankAlpha
from evo_grpo.schema.problems import Problem, Problems
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.settings.model import above_width


def rank_alpha(config: LoraConfig) -> RankAlpha:
    """Return the rank and the alpha of a configuration."""
    return RankAlpha(config.r, config.lora_alpha)


def narrowest(slots: AdapterSlots) -> tuple[str, int] | None:
    """Return the narrowest layer that may have an adapter, and its width; None without agents."""
    sets = slots.target_sets
    modules = {module for name in sets for module in sets.modules(name)}
    widths = {name: width_of(slots.base.model.get_submodule(name)) for name in modules}
    for slot in slots.names[:1]:  # a rank without agents has none
        for key, shape in slots.shapes(slot).items():
            own = shape[1] if ".lora_A." in key else shape[0]
            widths[module_of(key)] = min(own, widths.get(module_of(key), own))
    return min(widths.items(), key=lambda found: found[1], default=None)


def check_rank(slots: AdapterSlots, hparams: Hparams) -> None:
    """Check that the rank of an agent, if it has its own, is at most the width of every layer."""
    found = None if hparams.lora_r is None else narrowest(slots)
    if found is not None and (text := above_width(hparams.lora_r or 0, *found)):
        raise Problems(Problem((f"{LORA}r",), f"{text}; lower it"))


def adapter_config(slots: AdapterSlots, hparams: Hparams, adapter: str | None = None) -> LoraConfig:
    """Return the configuration of an agent's adapter, changed by its hyperparameters.

    `adapter` is the slot of the adapter; None is for a new one, of the run's configuration.
    """
    run, targets = slots.config, hparams.lora_target_modules
    own = run if adapter is None else slots.lora_config(adapter)
    if targets is not None:
        present = None if adapter is None else slots.modules(adapter)
        own = slots.target_sets.adapting(own, targets, present)
    if hparams.lora_r is None and hparams.lora_alpha is None:
        return own
    return with_rank(own, run, hparams.lora_r, hparams.lora_alpha)


def with_choices(hparams: Hparams, space: HyperparameterConfig) -> Hparams:
    """Return an agent's hyperparameters with the first choice for each name that has no value.

    Layers that are no named set stay without a name.
    """
    own = hparams.lora_target_modules
    return with_first_choices(hparams, space).replace(lora_target_modules=own)


def resize(
    slots: AdapterSlots,
    state: AgentState,
    hparams: Hparams,
    fresh_optimizer: Callable[[], torch.optim.Optimizer],
) -> None:
    """Give an agent's adapter the rank, alpha and layers of new hyperparameters.

    A grown rank gets moments of 0; AdamW starts afresh after a cut and in added layers.
    """
    if (hparams.lora_r, hparams.lora_alpha, hparams.lora_target_modules) == (None, None, None):
        return
    wanted = adapter_config(slots, hparams, state.adapter)
    if isinstance(state.optimizer, ZeroOptimizer):
        targets = hparams.lora_target_modules
        own = slots.target_sets.modules(targets) if targets else slots.modules(state.adapter)
        state.optimizer.engine.check_holds(wanted.r, own)
    keys = list(slots.shapes(state.adapter))
    before = {keys[place]: own for place, own in state.optimizer.state_dict()["state"].items()}
    found = resize_slot(slots, state.adapter, wanted)
    if found is None:
        return
    state.optimizer = fresh_optimizer()
    if found.error is not None and math.isfinite(found.error):
        state.rank_error = found.error
    moments = _resized(before, slots.shapes(state.adapter), found.factors)
    if moments:
        groups = state.optimizer.state_dict()["param_groups"]
        state.optimizer.load_state_dict({"state": moments, "param_groups": groups})


def _resized(
    moments: Mapping[str, Mapping[str, Any]],
    shapes: Mapping[str, torch.Size],
    factors: Mapping[str, float],
) -> dict[int, dict[str, Tensor]]:
    """Return AdamW's moments by parameter position, for parameters that were scaled and have grown.

    `moments` are by PEFT's file keys. The gradient of c B is that of B divided by c.
    """
    found: dict[int, dict[str, Tensor]] = {}
    for place, (key, shape) in enumerate(shapes.items()):
        if key in moments and key in factors:
            powers = {"exp_avg": factors[key], "exp_avg_sq": factors[key] ** 2}
            found[place] = dict(moments[key])
            for name, power in powers.items():
                value = moments[key][name]
                found[place][name] = padded(value, value.new_zeros(shape)) / power
    return found
