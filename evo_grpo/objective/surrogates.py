"""One function per GRPO loss and one per way to average, in a table.

A surrogate sees (B, T) tensors in which every masked token already carries log-ratio 0, so nothing
that stands in the padding can become NaN or overflow, forward or backward.

| loss_type | surrogate | mean over | source |
|---|---|---|---|
| grpo | clipped | rows | DeepSeekMath, arXiv:2402.03300 |
| gspo | clipped, one ratio per row | rows | arXiv:2507.18071 |
| bnpo | clipped | tokens of the batch | TRL's name for the local token mean |
| dr_grpo | clipped | rows x max_completion_length | arXiv:2503.20783 |
| dapo | clipped | tokens of the optimizer step | arXiv:2503.14476 |
| luspo | clipped | rows, each summed over its tokens | arXiv:2602.05261 |
| cispo | capped | tokens of the optimizer step | MiniMax-M1, arXiv:2506.13585 |
| sapo | soft gate | rows | arXiv:2511.20347 |
| vespo | gamma weight | tokens of the optimizer step | arXiv:2602.10693 |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from evo_grpo.errors import ConfigError
from evo_grpo.settings.loss import LossConfig, LossType

VESPO_LOG_CLAMP = 20.0
VESPO_LOWEST_LOG_WEIGHT = math.log(1e-8)


@dataclass(frozen=True)
class SurrogateInputs:
    """What a surrogate may use; floats of one dtype, all with gradients only through logprobs.

    Attributes:
        logprobs: (B, T) nats, 0 where masked.
        log_ratio: (B, T) per token, 0 where masked.
        ratio: (B, T) new / old policy at the level in force, 1 where masked.
        advantages: (B, 1) or (B, T), detached.
        clip_low: Absolute ratio bound, float or (B, 1).
        clip_high: Absolute ratio bound, float or (B, 1).
        sampler_log_weight: (B, 1) log of each row's sampler correction, or None.
    """

    logprobs: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    clip_low: float | Tensor
    clip_high: float | Tensor
    sampler_log_weight: Tensor | None


@dataclass(frozen=True)
class Surrogate:
    """A surrogate's outcome per token, before correction, KL and averaging.

    Attributes:
        loss: (B, T).
        clipped_low: (B, T) bool, the lower bound took the gradient away.
        clipped_high: (B, T) bool, the upper bound took the gradient away (cispo: capped it).
        coefficient: (B, T) detached factor on advantage x log-prob (cispo, vespo), else None.
    """

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    coefficient: Tensor | None = None


def clipped(given: SurrogateInputs, config: LossConfig) -> Surrogate:
    """-min(min(r, delta) A, clip(r, low, high) A): DeepSeekMath eq. 3."""
    ratio, advantages = given.ratio, given.advantages
    bounded = clamp(ratio, given.clip_low, given.clip_high)
    free = ratio if config.delta is None else ratio.clamp(max=config.delta)
    return Surrogate(
        loss=-torch.minimum(free * advantages, bounded * advantages),
        clipped_low=(ratio < given.clip_low) & (advantages < 0),
        clipped_high=(ratio > given.clip_high) & (advantages > 0),
    )


def capped(given: SurrogateInputs, config: LossConfig) -> Surrogate:
    """-detach(min(r, high)) A lp: MiniMax-M1 eq. 4 and 5 without a lower bound."""
    del config  # one signature for the table
    high = given.clip_high
    ratio = given.ratio.detach()
    coefficient = torch.minimum(ratio, high) if isinstance(high, Tensor) else ratio.clamp(max=high)
    exceeds = (ratio > high) & (given.advantages > 0)
    loss = -coefficient * given.advantages * given.logprobs
    return Surrogate(loss, torch.zeros_like(exceeds), exceeds, coefficient)


def soft_gate(given: SurrogateInputs, config: LossConfig) -> Surrogate:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A: SAPO."""
    temperature = _by_sign(
        given.advantages > 0, config.sapo_temperature_pos, config.sapo_temperature_neg, given.ratio
    )
    gate = torch.sigmoid(temperature * (given.ratio - 1)) * 4 / temperature
    return _unclipped(given, -gate * given.advantages)


def gamma_weight(given: SurrogateInputs, config: LossConfig) -> Surrogate:
    """-phi(w) A lp with phi(w) = w^k exp(lambda (1 - w)) of the row's ratio w, detached: VESPO."""
    log_ratio = given.log_ratio.detach()
    log_weight = log_ratio.clamp(-VESPO_LOG_CLAMP, VESPO_LOG_CLAMP).sum(-1, keepdim=True)
    if given.sampler_log_weight is not None:
        log_weight = log_weight + given.sampler_log_weight.clamp(
            VESPO_LOWEST_LOG_WEIGHT, VESPO_LOG_CLAMP
        )
    log_weight = log_weight.clamp(VESPO_LOWEST_LOG_WEIGHT, VESPO_LOG_CLAMP)
    gains = given.advantages >= 0
    k = _by_sign(gains, config.vespo_positive[0], config.vespo_negative[0], log_ratio)
    rate = _by_sign(gains, config.vespo_positive[1], config.vespo_negative[1], log_ratio)
    phi = torch.exp(rate + k * log_weight - rate * log_weight.exp())
    phi = phi.expand_as(given.ratio)
    return _unclipped(given, -phi * given.advantages * given.logprobs, phi)


def _by_sign(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    # where() of two numbers would be float32 whatever the log-probs are.
    return torch.where(condition, like.new_full((), yes), like.new_full((), no))


def _unclipped(
    given: SurrogateInputs, loss: Tensor, coefficient: Tensor | None = None
) -> Surrogate:
    never = torch.zeros_like(given.ratio, dtype=torch.bool)
    return Surrogate(loss, never, never, coefficient)


def clamp(values: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Clamp to bounds of which each may be a float or a (B, 1) tensor."""
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        low = low if isinstance(low, Tensor) else values.new_full((), low)
        high = high if isinstance(high, Tensor) else values.new_full((), high)
        return torch.clamp(values, low, high)
    return torch.clamp(values, low, high)


@dataclass(frozen=True)
class Totals:
    """What an average divides by.

    Attributes:
        rows: Rows of the optimizer step, number or (B, 1), >= 1.
        tokens: Valid tokens of the optimizer step, number or (B, 1), >= 1.
        row_tokens: (B, 1) valid tokens of each row, >= 1.
        max_completion_length: Tokens a completion may have, or None.
    """

    rows: float | Tensor
    tokens: float | Tensor
    row_tokens: Tensor
    max_completion_length: int | None


def per_row_mean(totals: Totals) -> Tensor | float:
    """Mean over rows of the mean over each row's tokens."""
    return 1 / (totals.rows * totals.row_tokens)


def per_row_sum(totals: Totals) -> Tensor | float:
    """Mean over rows of the sum over each row's tokens."""
    return 1 / totals.rows


def per_token(totals: Totals) -> Tensor | float:
    """Mean over all tokens: long rows weigh more."""
    return 1 / totals.tokens


def per_longest(totals: Totals) -> Tensor | float:
    """Sum over all tokens divided by a constant, so that length has no weight."""
    if totals.max_completion_length is None:
        raise ConfigError(
            "max_completion_length: expected an int >= 1 with loss_type='dr_grpo', got None; give "
            "the most tokens a completion may have, dr_grpo divides by it"
        )
    return 1 / (totals.rows * totals.max_completion_length)


@dataclass(frozen=True)
class Recipe:
    """One row of the table."""

    surrogate: Callable[[SurrogateInputs, LossConfig], Surrogate]
    weight: Callable[[Totals], Tensor | float]


RECIPES: Mapping[LossType, Recipe] = {
    "grpo": Recipe(clipped, per_row_mean),
    "gspo": Recipe(clipped, per_row_mean),
    "bnpo": Recipe(clipped, per_token),
    "dr_grpo": Recipe(clipped, per_longest),
    "dapo": Recipe(clipped, per_token),
    "luspo": Recipe(clipped, per_row_sum),
    "cispo": Recipe(capped, per_token),
    "sapo": Recipe(soft_gate, per_row_mean),
    "vespo": Recipe(gamma_weight, per_token),
}
