"""Checks of the inputs of `evo_grpo.quickstart`: models, optimizer, prompts, logits, rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from inspect import signature
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


def _takes_two(fn: Any) -> bool:  # noqa: ANN401 -- callers are untyped
    """Return whether a value can be called with two positional arguments."""
    try:
        signature(fn).bind(None, None)
    except TypeError:  # not callable, or of another signature
        return False
    except ValueError:  # a function written in C, without a signature
        pass
    return True


RULES: dict[str, Rule] = {
    "group_size": whole(2, "a group of one has no advantage"),
    "kl_coef": not_negative(),
    "learning_rate": above_zero().or_none(),
    "max_new_tokens": whole(1),
    "max_grad_norm": number(lambda v: v > 0, "a number > 0", "math.inf never clips"),
    "temperature": computable(LEAST, MOST),
    "advantage_clip": above_zero().or_none(),
    "level": Rule(lambda v: v in ("sequence", "token"), '"sequence" or "token"'),
    "reward_fn": Rule(
        _takes_two,
        "a function of two arguments, completions and prompts",
        "define it as def reward_fn(completions, prompts)",
    ),
    "eos_id": whole(0, "give a token id, or None for a fixed length").or_none(),
    "pad_id": whole(0, "give a token id"),
    "seed": whole(),
}


def check_models(model: nn.Module, ref_model: nn.Module) -> None:
    """Require a model with trainable weights, and a reference that shares none of them.

    Raises:
        ConfigError: One of the two is not a module, shares weights, or cannot be trained.
    """
    for name, value in (("model", model), ("ref_model", ref_model)):
        if not isinstance(value, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are untyped
            raise ConfigError(
                f"{name}: expected an nn.Module that maps ids (B, T) to logits (B, T, V), got "
                f"{type(value).__name__}"
            )
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
    if not isinstance(prompts, Tensor) or prompts.is_floating_point():
        kind = prompts.dtype if isinstance(prompts, Tensor) else type(prompts).__name__
        raise ShapeError(
            f"prompts: expected token ids as an int64 tensor (P, T), got {kind}; make one with "
            "torch.tensor([[1, 2, 3]])"
        )
    if prompts.ndim != 2 or not len(prompts) or prompts.shape[1] < 1:
        raise ShapeError(f"prompts: expected (P, T) with P, T >= 1, got {tuple(prompts.shape)}")


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
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"reward_fn {name!r}: expected {len(completions)} finite numbers, one per completion, "
            f"got {returned!r:.60}: {error}"
        ) from error
    if len(values) != len(completions) or not np.isfinite(values).all():
        raise RewardError(
            f"reward_fn {name!r}: expected {len(completions)} finite numbers, one per completion, "
            f"got {values[:4]}... of length {len(values)}"
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
