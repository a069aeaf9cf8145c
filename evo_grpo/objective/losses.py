"""Log-probs to the GRPO losses, per token and averaged; pure.

`token_terms` and `token_weights` are per row: each row may carry its own clip bounds, beta and
totals, and a NaN in one row reaches no other row's value or gradient. A population therefore
computes one loss over the rows of all its agents. `policy_loss` composes the two for one agent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evo_grpo.errors import ConfigError, ShapeError
from evo_grpo.objective.loss_metrics import TokenTerms, token_metrics
from evo_grpo.objective.off_policy import sampler_weight, within_trust
from evo_grpo.objective.ratios import kl_term, policy_ratio
from evo_grpo.objective.surrogates import RECIPES, SurrogateInputs, Totals
from evo_grpo.settings.loss import LossConfig, LossType

__all__ = [
    "LossConfig",
    "LossType",
    "TokenTerms",
    "policy_loss",
    "token_metrics",
    "token_terms",
    "token_weights",
]


def policy_loss(  # noqa: PLR0913 -- the tensors of one batch, each needed by some loss
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    mask: Tensor,
    advantages: Tensor,
    ref_logprobs: Tensor | None = None,
    *,
    config: LossConfig | None = None,
    sampler_logprobs: Tensor | None = None,
    num_rows: float | Tensor | None = None,
    num_tokens: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of one agent's batch.

    Args:
        logprobs: (B, T) floats, nats: log-probs of the sampled tokens, with gradient.
        old_logprobs: (B, T) nats under the policy before the update; None when that is the present
            one, which makes every ratio exactly 1 and lets the gradient through.
        mask: (B, T) bool or 0/1: the tokens that count.
        advantages: (B,) per row or (B, T) per token.
        ref_logprobs: (B, T) nats under the reference; needed when config.beta > 0.
        config: Settings; default `LossConfig()`.
        sampler_logprobs: (B, T) nats as the engine reported them, for `config.sampler_correction`.
        num_rows: Rows of the whole optimizer step, when this is one micro-batch of several and
            their losses are added; default B.
        num_tokens: Valid tokens of the whole optimizer step, likewise; default those of `mask`.

    Returns:
        loss: 0-dim, in logprobs' dtype or float32 if that is narrower.
        metrics: 0-dim detached tensors on the same device; see `token_metrics`.

    Raises:
        ShapeError: Shapes do not fit.
        ConfigError: beta > 0 without ref_logprobs.
    """
    config = config or LossConfig()
    terms = token_terms(
        logprobs,
        old_logprobs,
        mask,
        advantages,
        ref_logprobs,
        config=config,
        sampler_logprobs=sampler_logprobs,
    )
    valid = mask != 0
    weights = token_weights(
        config.loss_type,
        mask,
        num_rows=len(mask) if num_rows is None else num_rows,
        num_tokens=valid.sum() if num_tokens is None else num_tokens,
        max_completion_length=config.max_completion_length,
        dtype=terms.loss.dtype,
    )
    loss = torch.where(valid, weights * terms.loss, 0).sum()
    return loss, token_metrics(terms, mask, config=config)


def token_terms(  # noqa: PLR0913 -- the tensors of one batch, and what differs between its agents
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    mask: Tensor,
    advantages: Tensor,
    ref_logprobs: Tensor | None = None,
    *,
    config: LossConfig,
    clip_low: float | Tensor | None = None,
    clip_high: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
) -> TokenTerms:
    """Compute the loss of every token of rows that may belong to many agents.

    Args:
        logprobs: (B, T) floats, nats, with gradient.
        old_logprobs: (B, T) nats, or None: the present policy's, detached.
        mask: (B, T) bool or 0/1.
        advantages: (B,) or (B, T).
        ref_logprobs: (B, T) nats; may be NaN in rows whose beta is 0.
        config: Settings; the three overrides below replace its clip_coef and beta.
        clip_low: Absolute ratio bound, float or (B, 1).
        clip_high: Absolute ratio bound, float or (B, 1).
        beta: Weight of the KL term, float or (B, 1), >= 0.
        sampler_logprobs: (B, T) nats as the engine reported them.

    Returns:
        The terms. Rows are independent, in value and in gradient, and so are valid tokens from
        whatever stands in masked places.

    Raises:
        ShapeError: Shapes do not fit.
        ConfigError: A beta is not 0 and ref_logprobs is None.
    """
    _check_shapes(logprobs, old_logprobs, mask, advantages, ref_logprobs, sampler_logprobs)
    logprobs = _wide(logprobs)
    dtype, valid = logprobs.dtype, mask != 0
    old = logprobs.detach() if old_logprobs is None else old_logprobs.detach().to(dtype)
    per_row = advantages[:, None] if advantages.dim() == 1 else torch.where(valid, advantages, 0)
    per_row = per_row.detach().to(dtype)
    low, high = config.clip_bounds
    # where, never a product with the mask: 0 x NaN is NaN, and its gradient too.
    log_ratio = torch.where(valid, logprobs - old, 0)
    ratio = policy_ratio(log_ratio, valid, config.ratio_level)
    sampler = None
    if sampler_logprobs is not None:
        sampler = sampler_weight(old, sampler_logprobs.detach().to(dtype), valid, config)
    surrogate = RECIPES[config.loss_type].surrogate(
        SurrogateInputs(
            logprobs=torch.where(valid, logprobs, 0),
            log_ratio=log_ratio,
            ratio=ratio,
            advantages=per_row,
            clip_low=_per_row(low if clip_low is None else clip_low, "clip_low", logprobs),
            clip_high=_per_row(high if clip_high is None else clip_high, "clip_high", logprobs),
            sampler_log_weight=None if sampler is None else sampler.log_row,
        ),
        config,
    )
    loss = surrogate.loss
    if config.off_policy_mask_threshold is not None:
        sampled_by = old if sampler_logprobs is None else sampler_logprobs.detach().to(dtype)
        kept = within_trust(logprobs, sampled_by, per_row, valid, config.off_policy_mask_threshold)
        loss = torch.where(kept, loss, 0)
    if sampler is not None and config.loss_type != "vespo":  # vespo has it in its own weight
        loss = loss * sampler.factor
    weight = _per_row(config.beta if beta is None else beta, "beta", logprobs)
    kl = kl_term(
        logprobs, ref_logprobs, valid, weight, ratio if config.kl_bias_correction else None
    )
    if kl is not None:
        loss = loss + weight * kl
    return TokenTerms(
        loss=torch.where(valid, loss, 0),
        ratio=ratio.detach(),
        kl=None if kl is None else kl.detach(),
        clipped_low=surrogate.clipped_low & valid,
        clipped_high=surrogate.clipped_high & valid,
        coefficient=surrogate.coefficient,
    )


def token_weights(
    loss_type: LossType,
    mask: Tensor,
    *,
    num_rows: float | Tensor,
    num_tokens: float | Tensor,
    max_completion_length: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the weights that average token losses: loss = sum of where(mask, weights * loss, 0).

    Args:
        loss_type: Says what is averaged; see `evo_grpo.objective.surrogates`.
        mask: (B, T) bool or 0/1.
        num_rows: Rows of the optimizer step (rows without a valid token too), number or (B, 1):
            for rows of many agents, the totals of each row's own agent.
        num_tokens: Valid tokens of the optimizer step, likewise. bnpo is defined over the batch at
            hand: give that batch's count, or it is dapo.
        max_completion_length: Required for dr_grpo.
        dtype: Of the weights; default float64 for a float64 mask, else float32.

    Returns:
        (B, T), 0 where masked and in rows without a valid token.

    Raises:
        ConfigError: loss_type is unknown, or dr_grpo lacks max_completion_length.
        ShapeError: mask is not (B, T), or a total is neither a number nor (B, 1).
    """
    if loss_type not in RECIPES:
        raise ConfigError(
            f"loss_type: expected one of {', '.join(RECIPES)}, got {loss_type!r}; choose "
            "one of them"
        )
    if mask.dim() != 2:
        raise ShapeError(
            f"mask: expected shape (B, T), got {tuple(mask.shape)}; give one row per completion"
        )
    kind = dtype or (torch.float64 if mask.dtype == torch.float64 else torch.float32)
    valid = mask != 0
    row_tokens = valid.sum(-1, keepdim=True).clamp(min=1).to(kind)
    totals = Totals(
        rows=_at_least_one(_per_row(num_rows, "num_rows", row_tokens)),
        tokens=_at_least_one(_per_row(num_tokens, "num_tokens", row_tokens)),
        row_tokens=row_tokens,
        max_completion_length=max_completion_length,
    )
    weight = RECIPES[loss_type].weight(totals)
    weight = weight if isinstance(weight, Tensor) else row_tokens.new_full((), weight)
    return torch.where(valid, weight, 0)


def _wide(values: Tensor) -> Tensor:
    """Half precision is too coarse for ratios near 1."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _per_row(value: float | Tensor, name: str, like: Tensor) -> float | Tensor:
    """Check a number or one number per row; `like` has the rows and the dtype."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() and tuple(value.shape) != (len(like), 1):
        raise ShapeError(
            f"{name}: expected a number or a tensor of shape (B, 1) = ({len(like)}, 1), got shape "
            f"{tuple(value.shape)}; give each row its own value, unsqueezed"
        )
    return value.detach().to(like.dtype)


def _at_least_one(value: float | Tensor) -> float | Tensor:
    return value.clamp(min=1) if isinstance(value, Tensor) else max(value, 1)


def _check_shapes(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    mask: Tensor,
    advantages: Tensor,
    ref_logprobs: Tensor | None,
    sampler_logprobs: Tensor | None,
) -> None:
    shape = tuple(logprobs.shape)
    if len(shape) != 2 or not logprobs.is_floating_point():
        raise ShapeError(
            f"logprobs: expected floats of shape (B, T), got {logprobs.dtype} of shape {shape}; "
            "give the log-prob of each sampled token, padded to one length"
        )
    others = {
        "old_logprobs": old_logprobs,
        "mask": mask,
        "ref_logprobs": ref_logprobs,
        "sampler_logprobs": sampler_logprobs,
    }
    for name, tensor in others.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ShapeError(
                f"{name}: expected shape (B, T) = {shape}, that of logprobs, got "
                f"{tuple(tensor.shape)}; pad it as logprobs are"
            )
    if tuple(advantages.shape) not in ((shape[0],), shape):
        raise ShapeError(
            f"advantages: expected shape (B,) = ({shape[0]},) or (B, T) = {shape}, got "
            f"{tuple(advantages.shape)}; give one per row or one per token"
        )
