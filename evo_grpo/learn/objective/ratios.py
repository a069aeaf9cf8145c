"""The policy ratio and the KL estimate; masked values have no influence on either."""

from __future__ import annotations

import torch
from torch import Tensor

from evo_grpo.errors import ConfigError
from evo_grpo.settings.loss import RatioLevel

LOG_RATIO_CLAMP = 80.0
"""Beyond it exp() overflows in float32, and a clipped token's gradient would be 0 x inf = NaN."""


def policy_ratio(
    log_ratio: Tensor, valid: Tensor, level: RatioLevel, *, per_token: bool = False
) -> Tensor:
    """Return new / old policy, per token or per sequence.

    Args:
        log_ratio: (B, T) nats per token, 0 where masked.
        valid: (B, T) bool.
        level: "token", or "sequence" for the exponential of the row's mean log-ratio (GSPO,
            arXiv:2507.18071, eq. 7).
        per_token: Let the gradient through a sequence's ratio reach each token's own log-prob alone
            (GSPO-token, eq. 14 there). What differs between the tokens of a row, a shaped
            advantage or a KL, is then credited to the token that it belongs to; with one
            advantage for the row, the sum is GSPO's own gradient.

    Returns:
        (B, T), in [exp(-80), exp(80)], 1 where masked.
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

    That is exp(ref - lp) - (ref - lp) - 1; with the signs swapped it is no estimator of this KL.
    Log-probs are (B, T) nats; those of the reference may be NaN where beta is 0 or a token is
    masked. Of beta, a number or (B, 1), only whether it is 0 matters here. A ratio (B, T) new / old
    policy corrects the estimate for off-policy samples.

    Returns (B, T), 0 where masked or where beta is 0; None when there is no KL term at all.
    """
    if ref_logprobs is None:
        wanted = bool((beta != 0).any()) if isinstance(beta, Tensor) else beta != 0
        if wanted:
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
