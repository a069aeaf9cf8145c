"""Pure functions for the GRPO losses, per token and averaged.

`LOSSES` is the table of all losses. To add a loss, write its surrogate and its line of the table,
and declare its name in `LossType` and its settings in `LOSS_USES` of `evo_grpo.schema.hparams`.

| loss_type | surrogate | mean over | source |
|---|---|---|---|
| grpo | clipped | rows | DeepSeekMath, arXiv:2402.03300 |
| gspo | clipped, one ratio per row | rows | arXiv:2507.18071 |
| bnpo | clipped | tokens of the optimizer step | TRL's name for the local token mean |
| dr_grpo | clipped | rows x max_completion_length | arXiv:2503.20783 |
| dapo | clipped | tokens of the optimizer step | arXiv:2503.14476 |
| luspo | clipped | rows, each summed over its tokens | arXiv:2602.05261 |
| cispo | capped | tokens of the optimizer step | MiniMax-M1, arXiv:2506.13585 |
| sapo | soft gate | rows | arXiv:2511.20347 |
| vespo | gamma weight | tokens of the optimizer step | arXiv:2602.10693 |

bnpo and dapo are equal to the bit. TRL's bnpo divides by the tokens of a micro-batch; here results
do not depend on micro-batches, so it divides by the tokens of the optimizer step.

A surrogate gets (B, T) tensors in which every masked token has log-ratio 0, so padding cannot
become NaN or overflow in forward or backward.

`token_terms` and `token_weights` are per row: each row may have its own `LossValues` and totals,
and a NaN in one row reaches no other row's value or gradient. A population therefore computes one
loss over the rows of all its agents: the sum of weights times terms over valid tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from evo_grpo.errors import ConfigError
from evo_grpo.learn.objective.ratios import kl_term, policy_ratio, sampler_weight, within_trust
from evo_grpo.schema.hparams import LOSS_USES, Hparams, LossType, RatioLevel
from evo_grpo.settings.algorithm import LossConfig

VESPO_LOG_CLAMP = 20.0
VESPO_LOWEST_LOG_WEIGHT = math.log(1e-8)


@dataclass(frozen=True)
class LossValues:
    """The hyperparameters that the loss of a batch uses, by their names (see `Hparams.get`).

    Each is a float, the same for all rows, or a tensor (B, 1) that has the value of each row's
    agent and no gradient. The clip values bound the ratio.
    """

    beta: float | Tensor
    clip_low: float | Tensor
    clip_high: float | Tensor
    entropy_coef: float | Tensor = 0.0

    @classmethod
    def of_config(cls, config: LossConfig) -> Self:
        """Return the values of a configuration, the same for all rows."""
        low, high = config.clip_bounds
        return cls(beta=config.beta, clip_low=low, clip_high=high)

    @classmethod
    def of_agents(cls, agents: Sequence[Hparams], positions: Tensor, dtype: torch.dtype) -> Self:
        """Return the values of each row, (B, 1) of `dtype` on the device of `positions`.

        `positions` (B,) int64 is the agent of each row, in [0, N). A hyperparameter that is 0 for
        all N agents is the float 0.0, so that its term is not computed.
        """
        names = [field.name for field in fields(cls)]
        columns = [[agent.get(name) for agent in agents] for name in names]
        table = torch.tensor(columns, dtype=dtype, device=positions.device)[:, positions, None]
        values = zip(names, columns, table, strict=True)
        return cls(**{name: rows if any(column) else 0.0 for name, column, rows in values})


PENALTIES = ("beta", "entropy_coef")
"""Hyperparameters whose term in the loss does not depend on the advantage."""


def largest_penalty(hparams: Hparams) -> float:
    """Return the largest of an agent's `PENALTIES`; if > 0, rows of advantage 0 have a gradient."""
    return max(getattr(hparams, name) for name in PENALTIES)


@dataclass(frozen=True)
class TokenTerms:
    """The loss of every token before averaging; all but `loss` are detached.

    Attributes:
        loss: (B, T) float32 or wider; 0 where masked.
        ratio: (B, T) new / old policy at the level of `ratio_level`, at most exp(80); 1 where
            masked.
        kl: (B, T) nats, the k3 estimate, bias-corrected if the loss says so, not multiplied by
            beta; 0 where masked or where beta is 0. None when no row has a KL term.
        clipped_low: (B, T) bool, True where the lower bound removed the gradient.
        clipped_high: (B, T) bool, True where the upper bound removed the gradient (cispo: capped
            it).
    """

    loss: Tensor
    ratio: Tensor
    kl: Tensor | None
    clipped_low: Tensor
    clipped_high: Tensor


@dataclass(frozen=True)
class SurrogateInputs:
    """The input of a surrogate: floats of one dtype, with gradients only through logprobs.

    Tensors are (B, T), logs in nats, and neutral where masked: log-probs 0, ratios 1. `advantages`
    may be (B, 1); clip values are ratios, float or (B, 1). `ratio` is new / old policy at the level
    of `ratio_level`, and `sampler_log_weight` (B, 1) the log of each row's sampler correction. In
    the formulas of surrogates, r is `ratio`, A `advantages` and lp `logprobs`.
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
    """The `TokenTerms` of a surrogate alone, before sampler correction, KL, bonus and averaging."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def clipped(inputs: SurrogateInputs, config: LossConfig) -> Surrogate:
    """Return -min(min(r, delta) A, clip(r, low, high) A): DeepSeekMath eq. 3."""
    ratio, advantages = inputs.ratio, inputs.advantages
    bounded = _clamp(ratio, inputs.clip_low, inputs.clip_high)
    free = ratio if config.delta is None else ratio.clamp(max=config.delta)
    return Surrogate(
        loss=-torch.minimum(free * advantages, bounded * advantages),
        clipped_low=(ratio < inputs.clip_low) & (advantages < 0),
        clipped_high=(ratio > inputs.clip_high) & (advantages > 0),
    )


def capped(inputs: SurrogateInputs, config: LossConfig) -> Surrogate:
    """Return -detach(min(r, high)) A lp: MiniMax-M1 eq. 4 and 5 without a lower bound."""
    del config  # one signature for the table
    high = inputs.clip_high
    ratio = inputs.ratio.detach()
    coefficient = torch.minimum(ratio, high) if isinstance(high, Tensor) else ratio.clamp(max=high)
    exceeds = (ratio > high) & (inputs.advantages > 0)
    loss = -coefficient * inputs.advantages * inputs.logprobs
    return Surrogate(loss, torch.zeros_like(exceeds), exceeds)


def soft_gate(inputs: SurrogateInputs, config: LossConfig) -> Surrogate:
    """Return -(4 / tau) sigmoid(tau (r - 1)) A, where tau depends on the sign of A: SAPO."""
    temperature = _by_sign(
        inputs.advantages > 0,
        config.sapo_temperature_pos,
        config.sapo_temperature_neg,
        inputs.ratio,
    )
    gate = torch.sigmoid(temperature * (inputs.ratio - 1)) * 4 / temperature
    return _unclipped(inputs, -gate * inputs.advantages)


def gamma_weight(inputs: SurrogateInputs, config: LossConfig) -> Surrogate:
    """Return -phi(w) A lp, where w is the detached ratio of the whole row: VESPO.

    phi(w) = w^k exp(lambda (1 - w)); k and lambda depend on the sign of A.
    """
    log_ratio = inputs.log_ratio.detach()
    log_weight = log_ratio.clamp(-VESPO_LOG_CLAMP, VESPO_LOG_CLAMP).sum(-1, keepdim=True)
    if inputs.sampler_log_weight is not None:
        log_weight = log_weight + inputs.sampler_log_weight.clamp(
            VESPO_LOWEST_LOG_WEIGHT, VESPO_LOG_CLAMP
        )
    log_weight = log_weight.clamp(VESPO_LOWEST_LOG_WEIGHT, VESPO_LOG_CLAMP)
    gains = inputs.advantages >= 0
    k = _by_sign(gains, config.vespo_positive[0], config.vespo_negative[0], log_ratio)
    rate = _by_sign(gains, config.vespo_positive[1], config.vespo_negative[1], log_ratio)
    phi = torch.exp(rate + k * log_weight - rate * log_weight.exp())
    return _unclipped(inputs, -phi * inputs.advantages * inputs.logprobs)


def _by_sign(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    # where() of two numbers would be float32 whatever the log-probs are.
    return torch.where(condition, like.new_full((), yes), like.new_full((), no))


def _unclipped(inputs: SurrogateInputs, loss: Tensor) -> Surrogate:
    never = torch.zeros_like(inputs.ratio, dtype=torch.bool)
    return Surrogate(loss, never, never)


def _clamp(values: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Clamp values; each bound may be a float or a (B, 1) tensor."""
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        low = low if isinstance(low, Tensor) else values.new_full((), low)
        high = high if isinstance(high, Tensor) else values.new_full((), high)
        return torch.clamp(values, low, high)
    return torch.clamp(values, low, high)


@dataclass(frozen=True)
class Totals:
    """The counts by which the losses of one optimizer step are averaged.

    `rows` and `tokens` are the step's numbers of rows and of valid tokens, >= 1: floats, or (B, 1)
    with the numbers of each row's agent. `row_tokens` (B, 1) has the number of valid tokens of each
    row. `max_completion_length` is the maximum number of tokens of a completion, or None.
    """

    rows: float | Tensor
    tokens: float | Tensor
    row_tokens: Tensor
    max_completion_length: int | None


def per_row_mean(totals: Totals) -> Tensor | float:
    """Return weights for the mean over rows of the mean over each row's tokens."""
    return 1 / (totals.rows * totals.row_tokens)


def per_row_sum(totals: Totals) -> Tensor | float:
    """Return weights for the mean over rows of the sum over each row's tokens."""
    return 1 / totals.rows


def per_token(totals: Totals) -> Tensor | float:
    """Return weights for the mean over all tokens, where long rows weigh more."""
    return 1 / totals.tokens


def per_longest(totals: Totals) -> Tensor | float:
    """Return weights for (sum over all tokens) / (rows * max_completion_length)."""
    if totals.max_completion_length is None:
        raise ConfigError(
            "max_completion_length: expected an int >= 1 for a loss that divides by it, such as "
            "dr_grpo, got None; give the most tokens a completion may have"
        )
    return 1 / (totals.rows * totals.max_completion_length)


@dataclass(frozen=True)
class Loss:
    """A line of `LOSSES`: the surrogate of a token, and its weight in the sum over all tokens.

    `has_sampler_weight` says whether the surrogate itself applies the sampler correction.
    """

    surrogate: Callable[[SurrogateInputs, LossConfig], Surrogate]
    weight: Callable[[Totals], Tensor | float]
    has_sampler_weight: bool = False


LOSSES: Mapping[LossType, Loss] = {
    "grpo": Loss(clipped, per_row_mean),
    "gspo": Loss(clipped, per_row_mean),
    "bnpo": Loss(clipped, per_token),
    "dr_grpo": Loss(clipped, per_longest),
    "dapo": Loss(clipped, per_token),
    "luspo": Loss(clipped, per_row_sum),
    "cispo": Loss(capped, per_token),
    "sapo": Loss(soft_gate, per_row_mean),
    "vespo": Loss(gamma_weight, per_token, has_sampler_weight=True),
}


def ratio_level(config: LossConfig) -> RatioLevel:
    """Return the importance sampling level: as configured, or the default of the loss."""
    return config.importance_sampling_level or LOSS_USES[config.loss_type].level


def token_terms(  # noqa: PLR0913 -- the tensors of one batch
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    mask: Tensor,
    advantages: Tensor,
    ref_logprobs: Tensor | None = None,
    *,
    config: LossConfig,
    values: LossValues | None = None,
    entropies: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
) -> TokenTerms:
    """Compute the loss of every token of rows that may belong to many agents.

    The loss of a token is surrogate + beta * KL - entropy_coef * H, where H is the entropy of the
    policy over the whole vocabulary after the token's prefix, at the temperature of the log-probs.
    No gradient passes through the sampled prefixes. `token_weights` averages the entropy bonus like
    the rest of the loss, as verl's `entropy_coeff` with `loss_agg_mode` does. TRL's `entropy_coef`
    always multiplies the mean over tokens, as here in losses with the weight `per_token`.

    Values and gradients of a row do not depend on other rows or on masked tokens.

    Args:
        logprobs: (B, T) floats, nats, with gradient.
        old_logprobs: (B, T) nats; None takes `logprobs`, detached.
        mask: (B, T) bool or 0/1.
        advantages: (B,) or (B, T).
        ref_logprobs: (B, T) nats; may be NaN in rows whose beta is 0. None raises ConfigError if a
            beta is not 0.
        config: Settings that all rows share.
        values: Hyperparameters of the rows; None takes the clip_coef and beta of `config`.
        entropies: (B, T) nats, with gradient; may be NaN in rows whose entropy_coef is 0. It may be
            None only if entropy_coef is the float 0.0.
        sampler_logprobs: (B, T) nats, as the rollout engine recorded them; None: not corrected.
    """
    logprobs = _at_least_float32(logprobs)
    dtype, valid = logprobs.dtype, mask != 0
    old = logprobs.detach() if old_logprobs is None else old_logprobs.detach().to(dtype)
    per_row = advantages[:, None] if advantages.dim() == 1 else torch.where(valid, advantages, 0)
    per_row = per_row.detach().to(dtype)
    values = LossValues.of_config(config) if values is None else values
    beta = _per_row(values.beta, logprobs)
    loss_kind = LOSSES[config.loss_type]
    # where, never a product with the mask: 0 x NaN is NaN, and its gradient too.
    log_ratio = torch.where(valid, logprobs - old, 0)
    level = ratio_level(config)
    ratio = policy_ratio(log_ratio, valid, level, per_token=advantages.dim() == 2)
    sampler = None
    if sampler_logprobs is not None:
        sampler = sampler_weight(old, sampler_logprobs.detach().to(dtype), valid, config)
    surrogate = loss_kind.surrogate(
        SurrogateInputs(
            logprobs=torch.where(valid, logprobs, 0),
            log_ratio=log_ratio,
            ratio=ratio,
            advantages=per_row,
            clip_low=_per_row(values.clip_low, logprobs),
            clip_high=_per_row(values.clip_high, logprobs),
            sampler_log_weight=None if sampler is None else sampler.log_row,
        ),
        config,
    )
    loss = surrogate.loss
    if config.off_policy_mask_threshold is not None:
        sampled_by = old if sampler_logprobs is None else sampler_logprobs.detach().to(dtype)
        kept = within_trust(logprobs, sampled_by, per_row, valid, config.off_policy_mask_threshold)
        loss = torch.where(kept, loss, 0)
    if sampler is not None and not loss_kind.has_sampler_weight:
        loss = loss * sampler.factor
    # With one ratio per row: the row's value, and a gradient for each token by itself.
    row_ratio = policy_ratio(log_ratio, valid, level, per_token=True)
    correction = row_ratio if config.kl_bias_correction else None
    kl = kl_term(logprobs, ref_logprobs, valid, beta, correction)
    bonus = _entropy_bonus(entropies, valid, _per_row(values.entropy_coef, logprobs), dtype)
    loss = _with_penalties(loss, beta, kl, bonus)
    return TokenTerms(
        loss=torch.where(valid, loss, 0),
        ratio=ratio.detach(),
        kl=None if kl is None else kl.detach(),
        clipped_low=surrogate.clipped_low & valid,
        clipped_high=surrogate.clipped_high & valid,
    )


def _with_penalties(
    loss: Tensor, beta: float | Tensor, kl: Tensor | None, bonus: Tensor | None
) -> Tensor:
    """Return loss + beta * kl - bonus, (B, T); `kl` and `bonus` are left out if None."""
    if kl is not None:
        loss = loss + beta * kl
    return loss if bonus is None else loss - bonus


def _entropy_bonus(
    entropies: Tensor | None, valid: Tensor, coef: float | Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return coef * entropy (B, T), 0 where masked or coef is 0; None if coef is the float 0."""
    if not isinstance(coef, Tensor) and coef == 0:
        return None
    if entropies is None:
        raise ConfigError(
            f"entropies: expected a (B, T) = {tuple(valid.shape)} tensor with an entropy_coef, got "
            "None; give the entropies or set entropy_coef to 0.0"
        )
    return coef * torch.where(valid & (coef != 0), entropies.to(dtype), 0)


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

    `num_rows` counts the rows of the optimizer step, also those without a valid token, and
    `num_tokens` its valid tokens. Both are numbers, or (B, 1) with the totals of each row's agent.
    Weights are (B, T), 0 where masked. If `dtype` is None, they are float64 for a float64 mask,
    else float32. dr_grpo without a max_completion_length raises ConfigError.
    """
    float_dtype = dtype or (torch.float64 if mask.dtype == torch.float64 else torch.float32)
    valid = mask != 0
    row_tokens = valid.sum(-1, keepdim=True).clamp(min=1).to(float_dtype)
    totals = Totals(
        rows=_at_least_one(_per_row(num_rows, row_tokens)),
        tokens=_at_least_one(_per_row(num_tokens, row_tokens)),
        row_tokens=row_tokens,
        max_completion_length=max_completion_length,
    )
    weight = LOSSES[loss_type].weight(totals)
    weight = weight if isinstance(weight, Tensor) else row_tokens.new_full((), weight)
    return torch.where(valid, weight, 0)


def token_terms_of(
    configs: Sequence[LossConfig],
    logprobs: Tensor,
    inputs: Mapping[str, Tensor | None],
    values: LossValues,
) -> TokenTerms:
    """Compute `token_terms` of rows that may have different losses; rows stay independent.

    `configs` has the settings of each of the B rows. `inputs` has the other tensor arguments of
    `token_terms` by name, each None or with B rows. `logprobs` are (B, T) floats, nats, with
    gradient.
    """
    distinct = list(dict.fromkeys(configs))
    if len(distinct) == 1:
        whole_batch: dict[str, Any] = dict(inputs)
        return token_terms(logprobs, **whole_batch, config=distinct[0], values=values)
    order: list[Tensor] = []
    parts: list[TokenTerms] = []
    for kind in distinct:
        numbers = [row for row, config in enumerate(configs) if config == kind]
        rows = torch.tensor(numbers, device=logprobs.device)
        tensors: dict[str, Any] = {
            name: None if tensor is None else tensor[rows] for name, tensor in inputs.items()
        }
        part_values = {
            name: value[rows] if isinstance(value, Tensor) else value
            for name, value in vars(values).items()
        }
        parts.append(
            token_terms(logprobs[rows], **tensors, config=kind, values=LossValues(**part_values))
        )
        order.append(rows)
    inverse = torch.cat(order).argsort()

    def whole(name: str) -> Tensor | None:
        columns = [getattr(part, name) for part in parts]
        return None if columns[0] is None else torch.cat(columns)[inverse]

    return TokenTerms(**{field.name: whole(field.name) for field in fields(TokenTerms)})  # pyright: ignore[reportArgumentType] -- None for kl alone


def token_weights_of(
    configs: Sequence[LossConfig], mask: Tensor, *, num_rows: Tensor, num_tokens: Tensor
) -> Tensor:
    """Compute `token_weights` of rows that may have different losses; `configs` has one per row."""
    mixed: Tensor | None = None
    for kind in dict.fromkeys(configs):
        weights = token_weights(
            kind.loss_type,
            mask,
            num_rows=num_rows,
            num_tokens=num_tokens,
            max_completion_length=kind.max_completion_length,
        )
        matches = [[config == kind] for config in configs]
        mixed = weights if mixed is None else torch.where(mask.new_tensor(matches), weights, mixed)
    assert mixed is not None, "a batch has a row"
    return mixed


def _at_least_float32(values: Tensor) -> Tensor:
    """Convert half precision to float32, because half precision is too coarse for ratios near 1."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _per_row(value: float | Tensor, like: Tensor) -> float | Tensor:
    """Detach a tensor (B, 1) and convert it to the dtype of `like`; return a float as it is."""
    return value.detach().to(like.dtype) if isinstance(value, Tensor) else value


def _at_least_one(value: float | Tensor) -> float | Tensor:
    return value.clamp(min=1) if isinstance(value, Tensor) else max(value, 1)
