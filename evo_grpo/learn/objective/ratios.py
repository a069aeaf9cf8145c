"""The policy ratio, the KL estimate, and corrections for rows that another policy sampled."""

from dataclasses import dataclass

import torch
from torch import Tensor

from evo_grpo.errors import ConfigError
from evo_grpo.schema.hparams import RatioLevel
from evo_grpo.settings.algorithm import LossConfig

LOG_RATIO_CLAMP = 80.0
"""Bound of |log-ratio|: beyond, exp() overflows float32, and clipping gives 0 x inf = NaN."""


def policy_ratio(
    log_ratio: Tensor, valid: Tensor, level: RatioLevel, *, per_token: bool = False
) -> Tensor:
    """Return the ratio new / old policy (B, T), in [exp(-80), exp(80)], 1 where masked.

    `log_ratio` (B, T) are nats per token, 0 where masked. At level "sequence", the ratio is exp of
    the row's mean log-ratio (GSPO, arXiv:2507.18071, eq. 7). With `per_token`, the gradient of a
    sequence's ratio at a token reaches only that token's log-prob (GSPO-token, eq. 14 of that
    paper), so that shaped advantages or a KL, which differ between tokens, affect that token only.
    If all tokens have the same advantage, the gradient is that of GSPO.
    """
    if level == "sequence":
        count = valid.sum(-1, keepdim=True).clamp(min=1)
        if per_token:
            mean = log_ratio.detach().sum(-1, keepdim=True) / count
            log_ratio = torch.where(valid, mean + (log_ratio - log_ratio.detach()), 0)
        else:
            log_ratio = torch.where(valid, log_ratio.sum(-1, keepdim=True) / count, 0)
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def kl_term(
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    valid: Tensor,
    beta: float | Tensor,
    ratio: Tensor | None = None,
) -> Tensor | None:
    """Estimate KL(policy || reference) per token by k3 (Schulman, "Approximating KL Divergence").

    k3 is exp(ref - lp) - (ref - lp) - 1; with lp - ref in place of ref - lp it would not estimate
    this KL. Log-probs are (B, T) nats, and `beta` is a number or (B, 1). Where beta is 0 or a token
    is masked, the reference's log-probs may be NaN. `ratio` (B, T), new / old policy, multiplies
    the estimate to correct for off-policy samples. Returns the estimate (B, T), not multiplied by
    beta, 0 where a token is masked or beta is 0; None without a KL term.
    """
    if ref_logprobs is None:
        has_kl = bool((beta != 0).any()) if isinstance(beta, Tensor) else beta != 0
        if has_kl:
            raise ConfigError(
                f"ref_logprobs: expected a (B, T) = {tuple(logprobs.shape)} tensor with beta > 0, "
                "got None; give the reference's log-probs or set beta to 0.0"
            )
        return None
    if not isinstance(beta, Tensor) and beta == 0:
        return None
    active = valid & (beta != 0)
    # Tokens without a KL term are masked before exp(): 0 x NaN would be NaN, in the gradient too.
    gap = torch.where(active, ref_logprobs.detach().to(logprobs.dtype) - logprobs, 0)
    kl = torch.expm1(gap) - gap
    return kl if ratio is None else torch.where(active, kl * ratio, 0)


@dataclass(frozen=True)
class SamplerWeight:
    """Factors on the loss that correct for a sampler whose log-probs differ from the trainer's.

    `factor`, >= 0, is (B, T) for tokens or (B, 1) for rows; 0 drops the token or row. `log_row`
    (B, 1) is the logarithm of the product of each row's factors, -inf if one of them is 0. Both
    have no gradient.
    """

    factor: Tensor
    log_row: Tensor


def sampler_weight(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, config: LossConfig
) -> SamplerWeight | None:
    """Return the ratios trainer / sampler; above the cap, a ratio becomes the cap or 0.

    Truncation is that of "Your efficient RL framework secretly brings you off-policy RL training"
    (Yao et al. 2025). The ratio of a sequence is exp of the sum of its tokens' log-ratios, not of
    their mean. Log-probs are (B, T) nats. Returns None if the correction is "none".
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
    """Return the off-policy mask: True for advantages >= 0 and for rows close to their sampler.

    A row of low reward that a distant policy sampled says little about the current policy
    (DeepSeek-V3.2, arXiv:2512.02556). `logprobs` of the current policy and `sampled_by` of the
    sampling policy are (B, T) nats; `advantages` and the result are (B, 1) or (B, T). A row is
    close if its mean of `sampled_by` - `logprobs` is at most `threshold`, in nats per token.
    """
    gap = torch.where(mask, sampled_by - logprobs.detach(), 0).sum(-1, keepdim=True)
    gap = gap / mask.sum(-1, keepdim=True).clamp(min=1)
    return (advantages >= 0) | (gap <= threshold)
