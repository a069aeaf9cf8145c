"""Checks of the inputs of `evo_grpo.quickstart`: models, optimizer, prompts, logits, rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evo_grpo.errors import ConfigError, RewardError, RunFailedError, ShapeError
from evo_grpo.schema.validation import (
    LEAST,
    MOST,
    Rule,
    above_zero,
    computable,
    not_negative,
    number,
    whole,
)

RULES: dict[str, Rule] = {
    "group_size": whole(2, "a group of one has no advantage"),
    "kl_coef": not_negative(),
    "learning_rate": above_zero().or_none(),
    "max_new_tokens": whole(1),
    "max_grad_norm": number(lambda v: v > 0, "a number > 0", "math.inf never clips"),
    "temperature": computable(LEAST, MOST),
    "advantage_clip": above_zero().or_none(),
    "level": Rule(lambda v: v in ("sequence", "token"), '"sequence" or "token"'),
    "eos_id": whole(0, "give a token id, or None for a fixed length").or_none(),
    "pad_id": whole(0, "give a token id"),
    "seed": whole(),
}


def check_models(model: nn.Module, ref_model: nn.Module) -> None:
    """Require a model with trainable weights, and a reference that shares none of them.

    Raises:
        ConfigError: The two share weights, or the model cannot be trained.
    """
    weights = {id(p) for p in model.parameters()}
    if any(id(p) in weights for p in ref_model.parameters()):
        raise ConfigError(
            "ref_model: expected a separate frozen model, got one that shares weights with model; "
            "pass copy.deepcopy(model)"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(
            "model: expected trainable weights, got none that requires a gradient; call "
            "model.requires_grad_(True)"
        )


def make_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, learning_rate: float | None
) -> torch.optim.Optimizer:
    """Return the given optimizer, or Adam over the model.

    Raises:
        ConfigError: The given optimizer holds no parameter of the model, or a learning rate was
            passed along with it.
    """
    if optimizer is None:
        rate = 1e-4 if learning_rate is None else learning_rate
        return torch.optim.Adam(model.parameters(), lr=rate)
    if learning_rate is not None:
        raise ConfigError(
            f"learning_rate={learning_rate!r}: has no effect with optimizer=, which has its own; "
            "remove it"
        )
    weights = {id(p) for p in model.parameters() if p.requires_grad}
    if not any(id(p) in weights for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            "optimizer: expected one over the model's parameters, got one that holds none of them; "
            "build it with model.parameters()"
        )
    return optimizer


def check_prompts(prompts: object) -> None:
    """Require a matrix of token ids.

    Raises:
        ShapeError: The prompts are anything else.
    """
    got = (
        f"{tuple(prompts.shape)} {prompts.dtype}" if isinstance(prompts, Tensor) else repr(prompts)
    )
    if not isinstance(prompts, Tensor) or (
        prompts.is_floating_point() or prompts.ndim != 2 or not prompts.numel()
    ):
        raise ShapeError(
            "prompts: expected token ids as an int64 tensor (P, T) with P, T >= 1, got "
            f"{got:.80}; make one with torch.tensor([[1, 2, 3]])"
        )


def call_model(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits (B, T, V) of a model, from a tensor or an output with `.logits`.

    Raises:
        ShapeError: The model returns anything else.
    """
    output: Any = model(ids)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ShapeError(
            f"model {type(model).__name__}: expected logits (B, T, V) = ({ids.shape[0]}, "
            f"{ids.shape[1]}, V), or an output with .logits, got {got}; wrap the model so that "
            "forward(ids) returns its logits alone"
        )
    return logits


def call_reward_fn(
    reward_fn: Callable[[Tensor, Tensor], Sequence[float]], completions: Tensor, prompts: Tensor
) -> np.ndarray:
    """Return the float64 rewards (B,) of completions (B, C).

    Raises:
        RewardError: The function returned anything but one finite number per completion.
    """
    name = getattr(reward_fn, "__name__", reward_fn)
    returned: Any = reward_fn(completions, prompts)
    if isinstance(returned, Tensor):
        returned = returned.detach().cpu()
    try:
        values = np.asarray(returned, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError):
        values = np.array([np.nan])
    if len(values) != len(completions) or not np.isfinite(values).all():
        raise RewardError(
            f"reward_fn {name!r}: expected {len(completions)} finite numbers, one per completion, "
            f"got {len(values)}: {returned!r:.60}"
        )
    return values


def check_finite(step: int, what: str, value: float) -> None:
    """Stop training before an update with NaN or infinity in the loss or the gradient's norm.

    Raises:
        RunFailedError: The value is not finite.
    """
    if not math.isfinite(value):
        raise RunFailedError(
            f"step {step}: expected a finite {what}, got {value}: logits of model or ref_model are "
            "not finite. The update was skipped; lower learning_rate, or load() an earlier "
            "checkpoint"
        )
