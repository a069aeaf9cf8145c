"""Pure functions that penalize length in rewards and filter, whiten and clip advantages."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from evo_grpo.envs.protocol import Experience, Floats
from evo_grpo.types import Trajectory

WHITEN_EPS = 1e-8


def token_advantages(
    advantages: Tensor,
    mask: Tensor,
    *,
    kl: Tensor | None = None,
    beta: float | Tensor = 0.0,
    whiten: bool = False,
    clip_range: float | None = None,
    filter_zero: bool = False,
    filter_eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Spread one agent's advantages (B,) over the tokens of a mask (B, T), and shape them.

    First, `filter_zero` drops rows with |A| <= filter_eps. Then `whiten` replaces A by (A - mean) /
    sqrt(var + 1e-8), with the biased variance, over the valid tokens of the kept rows, so long rows
    weigh more. Then KL shaping adds beta (baseline_t - kl_t). Its policy gradient is that of -beta
    times the sum over the tokens of KL(policy || reference) after the sampled prefix. At the end,
    `clip_range` clamps A to [-clip_range, clip_range].

    As an advantage, `kl` must be the signed k1, log policy - log reference: the expectation of grad
    log policy times k1 is the gradient of KL(policy || reference). With k3, which is never
    negative, the policy would be pushed away from the reference. The baseline is the mean of the
    row's earlier tokens, 0 for the first. A baseline that depends on the token itself or later
    ones, such as the mean over the whole row, biases the gradient.

    `kl` (B, T) are nats, detached here; `beta` is a float or (B, 1), >= 0, and rows with 0 get no
    KL shaping. Returns the advantages (B, T), detached, 0 where masked and in dropped rows, and
    which rows are kept (B,) bool; the caller leaves dropped rows out of the backward.
    """
    advantages = advantages.detach()
    is_kept = torch.ones_like(advantages, dtype=torch.bool)
    if filter_zero:
        is_kept = advantages.abs() > filter_eps
    valid = (mask != 0) & is_kept[:, None]
    shaped = torch.where(valid, advantages[:, None], 0)
    if whiten:
        shaped = _whiten(shaped, valid)
    if kl is not None:
        weighed = valid & (beta > 0)
        shaped = shaped + beta * _below_earlier_mean(kl.detach().to(shaped.dtype), weighed)
    if clip_range is not None:
        shaped = shaped.clamp(-clip_range, clip_range)
    return torch.where(valid, shaped, 0), is_kept


def _whiten(values: Tensor, valid: Tensor) -> Tensor:
    count = valid.sum().clamp(min=1)
    centred = torch.where(valid, values - values.sum() / count, 0)
    return centred * torch.rsqrt(centred.square().sum() / count + WHITEN_EPS)


def _below_earlier_mean(kl: Tensor, valid: Tensor) -> Tensor:
    """Return, for each token, the mean KL of the row's valid tokens before it, minus its own KL."""
    kl = torch.where(valid, kl, 0)
    earlier = torch.nn.functional.pad(kl, (1, 0))[:, :-1].cumsum(-1)
    count = valid.cumsum(-1) - valid.to(torch.long)
    return earlier / count.clamp(min=1) - kl


METRIC = "overlong_penalty"


def overlong_penalties(lengths: Sequence[int], longest: int, buffer: int) -> Floats:
    """Return the soft overlong punishment of DAPO (arXiv:2503.14476, equation 13), (B,) float64.

    It is 0 for `lengths` (B,) up to `longest - buffer` tokens, then falls linearly to -1 at
    `longest` tokens and beyond; `buffer` is 1 to `longest`.
    """
    beyond = np.asarray(lengths, dtype=np.float64) - (longest - buffer)
    return np.clip(-beyond / buffer, -1.0, 0.0)


def with_overlong_penalty(experience: Experience, penalties: Floats, weight: float) -> Experience:
    """Return a copy of an experience with `penalties` (B,) as a further column of its rewards.

    Rows without any reward get no penalty. The metric `overlong_penalty` is `weight`, the weight of
    this column, times the mean penalty of the rows that have a reward.
    """
    has_reward = ~np.isnan(experience.rewards).all(axis=1)
    column = np.where(has_reward, penalties, np.nan)[:, None]
    mean = float(weight * penalties[has_reward].mean()) if has_reward.any() else 0.0
    return Experience(
        experience.trajectories,
        np.concatenate([experience.rewards, column], axis=1),
        {**experience.metrics, METRIC: mean},
    )


def longest_completion(trajectory: Trajectory) -> int:
    """Return the number of tokens of a completion, or of the longest completion of an episode."""
    if trajectory.turns == 1:
        return trajectory.sampled
    # Between two completions of an episode are tokens of the environment or the chat template.
    edges = np.flatnonzero(np.diff(np.r_[False, trajectory.mask, False].astype(np.int8)))
    return int((edges[1::2] - edges[::2]).max(initial=0))
