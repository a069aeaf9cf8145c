"""Optional shaping of advantages per token: filter, whiten, fold in the KL, clip; pure."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from evo_grpo.errors import ConfigError, ShapeError

WHITEN_EPS = 1e-8


def token_advantages(  # noqa: PLR0913 -- the switches of the reference API, all but two with a default
    advantages: Tensor,
    mask: Tensor,
    *,
    kl: Tensor | None = None,
    beta: float = 0.0,
    whiten: bool = False,
    clip_range: float | None = None,
    filter_zero: bool = False,
    filter_eps: float = 0.0,
    use_kl_shaping: bool = False,
) -> tuple[Tensor, Tensor]:
    """Spread one agent's advantages over tokens and shape them, in this order.

    filter_zero drops rows with |A| <= filter_eps; whiten makes the valid tokens of the kept rows
    (A - mean) / sqrt(var + 1e-8), var over n; KL shaping adds beta (mean_t kl - kl_t), which takes
    from the tokens that stray most from the reference and gives to the others of the row;
    clip_range clamps.

    Args:
        advantages: (B,) floats.
        mask: (B, T) bool or 0/1.
        kl: (B, T) nats per token against the reference; detached here. Needed by use_kl_shaping.
        beta: Weight of the KL shaping, >= 0.
        whiten: Whiten over valid tokens: long rows weigh more.
        clip_range: Clamp to [-clip_range, clip_range], > 0; None leaves them.
        filter_zero: Drop rows that carry no signal.
        filter_eps: What counts as none, >= 0.
        use_kl_shaping: Shape by the KL, in place of a KL penalty in the loss.

    Returns:
        advantages: (B, T) in the advantages' dtype, detached; 0 where masked and in dropped rows.
        kept: (B,) bool, False for dropped rows; leave those out of the backward pass.

    Raises:
        ShapeError: Shapes do not fit.
        ConfigError: A number is out of range, or use_kl_shaping lacks kl.
    """
    _check_numbers(beta, clip_range, filter_eps)
    _check_tensors(advantages, mask, kl)
    advantages = advantages.detach()
    kept = torch.ones_like(advantages, dtype=torch.bool)
    if filter_zero:
        kept = advantages.abs() > filter_eps
    valid = (mask != 0) & kept[:, None]
    shaped = torch.where(valid, advantages[:, None], 0)
    if whiten:
        shaped = _whiten(shaped, valid)
    if use_kl_shaping:
        if kl is None:
            raise ConfigError(
                "kl: expected a (B, T) tensor with use_kl_shaping=True, got None; compute the KL "
                "against the reference first"
            )
        shaped = shaped + beta * _above_row_mean(kl.detach().to(shaped.dtype), valid)
    if clip_range is not None:
        shaped = shaped.clamp(-clip_range, clip_range)
    return torch.where(valid, shaped, 0), kept


def _whiten(values: Tensor, valid: Tensor) -> Tensor:
    count = valid.sum().clamp(min=1)
    centred = torch.where(valid, values - values.sum() / count, 0)
    return centred * torch.rsqrt(centred.square().sum() / count + WHITEN_EPS)


def _above_row_mean(kl: Tensor, valid: Tensor) -> Tensor:
    kl = torch.where(valid, kl, 0)
    mean = kl.sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)
    return mean - kl


def _check_numbers(beta: float, clip_range: float | None, filter_eps: float) -> None:
    if not 0 <= beta < math.inf:
        raise ConfigError(f"beta: expected a finite number >= 0, got {beta!r}; 0.0 turns it off")
    if clip_range is not None and not 0 < clip_range < math.inf:
        raise ConfigError(
            f"clip_range: expected None or a finite number > 0, got {clip_range!r}; None leaves "
            "advantages unclipped"
        )
    if not 0 <= filter_eps < math.inf:
        raise ConfigError(
            f"filter_eps: expected a finite number >= 0, got {filter_eps!r}; 0.0 drops only zeros"
        )


def _check_tensors(advantages: Tensor, mask: Tensor, kl: Tensor | None) -> None:
    if advantages.dim() != 1 or not advantages.is_floating_point():
        raise ShapeError(
            f"advantages: expected floats of shape (B,), got {advantages.dtype} of shape "
            f"{tuple(advantages.shape)}; give one advantage per completion"
        )
    rows = len(advantages)
    if mask.dim() != 2 or len(mask) != rows:
        raise ShapeError(
            f"mask: expected shape (B, T) = ({rows}, T), got {tuple(mask.shape)}; give one row per "
            "advantage"
        )
    if kl is not None and kl.shape != mask.shape:
        raise ShapeError(
            f"kl: expected shape (B, T) = {tuple(mask.shape)}, got {tuple(kl.shape)}; pad it as "
            "the mask is"
        )
