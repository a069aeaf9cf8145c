"""The adapter of an agent, which follows the rank and alpha among its hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from evo_grpo.errors import ConfigError
from evo_grpo.model.lora.configs import differences, module_of
from evo_grpo.model.lora.resize import resize_slot, with_rank
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.population.cohort.state import AgentState
from evo_grpo.population.zero.turns import ZeroOptimizer
from evo_grpo.schema.hparams import LORA, Hparams, RankAlpha
from evo_grpo.schema.problems import Problem, Problems
from evo_grpo.settings.adapters import above_width


def rank_alpha(config: LoraConfig) -> RankAlpha:
    """Return the rank and the alpha of a configuration."""
    return RankAlpha(config.r, config.lora_alpha)


def narrowest(slots: AdapterSlots) -> tuple[str, int] | None:
    """Return the narrowest layer with an adapter, and its width; None without agents."""
    widths: dict[str, int] = {}
    for slot in slots.names[:1]:  # a rank without agents has none
        for key, shape in slots.shapes(slot).items():
            own = shape[1] if ".lora_A." in key else shape[0]
            widths[module_of(key)] = min(own, widths.get(module_of(key), own))
    return min(widths.items(), key=lambda found: found[1], default=None)


def check_rank(slots: AdapterSlots, hparams: Hparams) -> None:
    """Check that the rank of an agent, if it has its own, is at most the width of every layer.

    Raises:
        Problems: It is not; the error names the layer.
    """
    found = None if hparams.lora_r is None else narrowest(slots)
    if found is not None and (text := above_width(hparams.lora_r or 0, *found)):
        raise Problems(Problem((f"{LORA}r",), f"{text}; lower it"))


def adapter_config(run: LoraConfig, hparams: Hparams, own: LoraConfig | None = None) -> LoraConfig:
    """Return the configuration of an agent's adapter.

    Args:
        run: The configuration of the run.
        hparams: Hyperparameters of the agent. Without a rank and an alpha, the configuration stays.
        own: The configuration that it has; None for that of the run.
    """
    own = run if own is None else own
    if hparams.lora_r is None and hparams.lora_alpha is None:
        return own
    return with_rank(own, run, hparams.lora_r, hparams.lora_alpha)


def resize(
    slots: AdapterSlots,
    state: AgentState,
    hparams: Hparams,
    fresh_optimizer: Callable[[], torch.optim.Optimizer],
) -> None:
    """Give an agent's adapter the rank and alpha of new hyperparameters; see `model.lora.resize`.

    If the rank grows, the new parameters have moments of 0. If it is cut, AdamW starts afresh. The
    reference is frozen and keeps its rank.

    Raises:
        ConfigError: With engine.zero, where all agents train through one adapter.
    """
    if hparams.lora_r is None and hparams.lora_alpha is None:
        return
    own = slots.lora_config(state.adapter)
    wanted = adapter_config(slots.config, hparams, own)
    if isinstance(state.optimizer, ZeroOptimizer) and differences(wanted, own):
        raise ConfigError(
            f"lora.r of agent {state.slot}: expected its present rank and alpha, {own.r} and "
            f"{own.lora_alpha:g}, with engine.zero, where all agents train through one adapter of "
            f"DeepSpeed's, got {wanted.r} and {wanted.lora_alpha:g}; set zero to null"
        )
    found = resize_slot(slots, state.adapter, wanted)
    if found is None:
        return
    before = state.optimizer.state_dict()["state"]
    state.optimizer = fresh_optimizer()
    if found.error is not None and math.isfinite(found.error):
        state.rank_error = found.error
    if found.factors is not None and before:
        shapes = slots.shapes(state.adapter)
        moments = _resized(before, shapes, found.factors)
        groups = state.optimizer.state_dict()["param_groups"]
        state.optimizer.load_state_dict({"state": moments, "param_groups": groups})


def _resized(
    moments: Mapping[int, Mapping[str, Any]],
    shapes: Mapping[str, torch.Size],
    factors: Mapping[str, float],
) -> dict[int, dict[str, Tensor]]:
    """Return AdamW's moments for parameters that were multiplied by a factor, and have grown.

    The gradient of c B is that of B divided by c.
    """
    found: dict[int, dict[str, Tensor]] = {}
    for place, (key, shape) in enumerate(shapes.items()):
        if place in moments:
            powers = {"exp_avg": factors[key], "exp_avg_sq": factors[key] ** 2}
            found[place] = {
                name: _padded(value, shape) / powers[name] if name in powers else value
                for name, value in moments[place].items()
            }
    return found


def _padded(value: Tensor, shape: torch.Size) -> Tensor:
    out = value.new_zeros(shape)
    out[tuple(slice(0, size) for size in value.shape)] = value
    return out
