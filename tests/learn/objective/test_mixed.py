"""Rows of different losses in one batch."""

from dataclasses import fields

import torch
from batch_loss import config_of, random_batch

from evo_grpo.learn.objective.losses import LOSSES, LossValues, token_terms, token_weights
from evo_grpo.learn.objective.mixed import token_terms_of, token_weights_of

LOSS_TYPES = tuple(LOSSES)


def test_rows_of_all_losses_in_one_batch_equal_one_call_per_loss():
    batch = random_batch(rows=18)
    batch["sampler"] = batch["old"] + 0.01
    configs = [config_of(loss_type, beta=0.1, delta=1.5) for loss_type in LOSS_TYPES * 2]
    bounds = torch.linspace(1.05, 1.5, 18, dtype=torch.float64)[:, None]
    values = LossValues(beta=0.1 * bounds, clip_low=0.8, clip_high=bounds)
    names = {"old_logprobs": "old", "mask": "mask", "advantages": "adv", "ref_logprobs": "ref"}
    given = {name: batch[key] for name, key in names.items()}
    given |= {"entropies": None, "sampler_logprobs": batch["sampler"]}
    totals = {"num_rows": bounds * 10, "num_tokens": bounds * 40}
    lp = batch["lp"].clone().requires_grad_()
    terms = token_terms_of(configs, lp, given, values)
    weights = token_weights_of(configs, batch["mask"], **totals)
    (weights * terms.loss).sum().backward()
    for place, config in enumerate(configs[: len(LOSS_TYPES)]):
        rows = torch.tensor([place, place + len(LOSS_TYPES)])
        own = {name: None if one is None else one[rows] for name, one in given.items()}
        alone_lp = batch["lp"][rows].requires_grad_()
        its = LossValues(beta=values.beta[rows], clip_low=0.8, clip_high=bounds[rows])
        alone = token_terms(alone_lp, **own, config=config, values=its)
        its_weights = token_weights(
            config.loss_type,
            batch["mask"][rows],
            **{name: total[rows] for name, total in totals.items()},
            max_completion_length=5,
        )
        (its_weights * alone.loss).sum().backward()
        assert torch.equal(lp.grad[rows], alone_lp.grad)
        assert torch.equal(weights[rows], its_weights)
        for field in fields(alone):
            assert torch.equal(getattr(terms, field.name)[rows], getattr(alone, field.name))
