"""Corrections for rows sampled by another policy, or by the same policy in another engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evo_grpo.settings.loss import LossConfig


@dataclass(frozen=True)
class SamplerWeight:
    """Correction for a sampler whose numbers differ from the trainer's.

    Attributes:
        factor: (B, T) or (B, 1), >= 0, detached; 0 where dropped.
        log_row: (B, 1) log of the row's whole correction; -inf where dropped.
    """

    factor: Tensor
    log_row: Tensor


def sampler_weight(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, config: LossConfig
) -> SamplerWeight | None:
    """Weigh rows by trainer / sampler: truncated importance sampling, or rejection above the cap.

    The truncated form is that of "Your efficient RL framework secretly brings you off-policy RL
    training" (Yao et al. 2025); per sequence the token log-ratios are summed, not averaged. All
    log-probs are (B, T) nats. None when the correction is "none".
    """
    if config.sampler_correction == "none":
        return None
    level, action = config.sampler_correction.split("_")
    log_factor = torch.where(mask, old_logprobs - sampler_logprobs, 0)
    if level == "sequence":
        log_factor = log_factor.sum(-1, keepdim=True)
    factor = log_factor.exp()
    cap = config.sampler_ratio_cap
    factor = factor.clamp(max=cap) if action == "truncate" else factor.where(factor <= cap, 0)
    log_row = factor.log().sum(-1, keepdim=True)  # a masked token has log 1 = 0
    return SamplerWeight(factor, log_row)


def within_trust(
    logprobs: Tensor, sampled_by: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Return the off-policy mask: True for advantages >= 0 and for rows near their sampler.

    A low-reward row sampled by a distant policy says little about the current one (DeepSeek-V3.2,
    arXiv:2512.02556). `logprobs` of the policy and `sampled_by` of the policy that sampled the row
    are (B, T) nats. `advantages` and the result are (B, 1) or (B, T). `threshold` is in nats per
    token.
    """
    gap = torch.where(mask, sampled_by - logprobs.detach(), 0).sum(-1, keepdim=True)
    gap = gap / mask.sum(-1, keepdim=True).clamp(min=1)
    return (advantages >= 0) | (gap <= threshold)
