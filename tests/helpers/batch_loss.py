"""The loss of one agent's batch, and what TRL logs of it, from the package's terms and weights."""

import torch

from evo_grpo.learn.objective.losses import LossConfig, ratio_level, token_terms, token_weights


def policy_loss(
    logprobs,
    old,
    mask,
    advantages,
    ref=None,
    *,
    config=None,
    num_rows=None,
    num_tokens=None,
    **more,
):
    """The 0-dim loss, and the (B, T) terms it is the weighted sum of."""
    config = config or LossConfig()
    terms = token_terms(logprobs, old, mask, advantages, ref, config=config, **more)
    valid = mask != 0
    weights = token_weights(
        config.loss_type,
        mask,
        num_rows=len(mask) if num_rows is None else num_rows,
        num_tokens=valid.sum() if num_tokens is None else num_tokens,
        max_completion_length=config.max_completion_length,
        dtype=terms.loss.dtype,
    )
    return torch.where(valid, weights * terms.loss, 0).sum(), terms


def row_means(values, mask):
    valid = mask != 0
    return torch.where(valid, values.double(), 0).sum(-1) / valid.sum(-1).clamp(min=1)


def clip_metrics(terms, mask, config):
    """Fractions of tokens clipped, of rows at sequence level, under the names that TRL logs."""
    valid = mask != 0

    def mean(values):
        if ratio_level(config) == "sequence":
            return row_means(values, mask).mean().item()
        return values[valid].double().mean().item()

    low, high = terms.clipped_low, terms.clipped_high
    if config.loss_type == "cispo":
        return {"cispo_clip_ratio": mean(high)}
    return {
        "clip_ratio/low_mean": mean(low),
        "clip_ratio/high_mean": mean(high),
        "clip_ratio/region_mean": mean(low | high),
        "clip_ratio/low_min": row_means(low, mask).min().item(),
        "clip_ratio/high_max": row_means(high, mask).max().item(),
    }


def trl_metrics(terms, logprobs, mask, advantages, config):
    """What TRL logs of a batch, but for the entropy."""
    found = {} if terms.kl is None else {"kl": terms.kl[mask != 0].mean().item()}
    if config.loss_type == "vespo":
        return found | {"vespo/phi_seq_mean": vespo_weights(terms, logprobs, mask, advantages)}
    return found if config.loss_type == "sapo" else found | clip_metrics(terms, mask, config)


def vespo_weights(terms, logprobs, mask, advantages):
    """Mean of the rows' weights phi, by which the gradient exceeds that of REINFORCE."""
    (grad,) = torch.autograd.grad(terms.loss.sum(), logprobs, retain_graph=True)
    return row_means(-grad / advantages[:, None], mask).mean().item()


def random_batch(rows=6, tokens=5, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    lp = -normal(rows, tokens).abs() - 0.1
    mask = torch.arange(tokens) < torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    return {
        "lp": lp,
        "old": lp + 0.3 * normal(rows, tokens),
        "ref": lp + 0.3 * normal(rows, tokens),
        "mask": mask,
        "adv": normal(rows),
    }


def config_of(loss_type, **more):
    return LossConfig(loss_type=loss_type, max_completion_length=5, **more)
