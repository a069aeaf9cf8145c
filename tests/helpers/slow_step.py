"""One learn call of one agent as written on paper: row by row, log_softmax, policy_loss, AdamW."""

import numpy as np
import torch
from batch_loss import policy_loss
from tiny_cohort import fresh, weights

from evo_grpo.learn.rows import assign_minibatches
from evo_grpo.seeding import derive


def logprob_table(cohort, slot, rows, temperature, width=None):
    """(B, C) log-probs of the generated tokens through one adapter, 0 in the padding."""
    cohort.slots.activate(cohort.agents[slot].adapter)
    return _table(cohort.slots.peft, rows, temperature, width)


def _table(model, rows, temperature, width=None):
    width = width or max(row.generated for row in rows)
    lines = []
    for row in rows:
        ids = torch.as_tensor(row.token_ids)
        logits = model(input_ids=ids[None]).logits[0, :-1] / temperature
        lp = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
        lp = lp[torch.as_tensor(row.mask[1:])]
        lines.append(torch.nn.functional.pad(lp, (0, width - len(lp))))
    return torch.stack(lines)


def slow_step(cohort, rows, hparams, loss, *, slot=0, seed=3, exact_sampler=True):
    """The agent's weights afterwards, and the means of loss and gradient norm over its steps."""
    rows = fresh(rows)
    assign_minibatches(rows, hparams, derive(seed, "order", slot))
    parameters = cohort.slots.parameters(cohort.agents[slot].adapter)
    width = max(row.generated for row in rows)

    def table(chosen):
        return logprob_table(cohort, slot, chosen, hparams.temperature, width)

    mask = torch.arange(width) < torch.tensor([row.generated for row in rows])[:, None]
    advantages = torch.tensor([row.advantage for row in rows])
    with torch.no_grad():
        old = table(rows)
        with cohort.slots.peft.disable_adapter():
            ref = _table(cohort.slots.peft, rows, hparams.temperature, width)
    sampler = old.clone()
    for line, row in zip(sampler, rows, strict=True):
        if row.sampler_logprobs is not None:
            line[: row.generated] = torch.from_numpy(row.sampler_logprobs)
    optimizer = torch.optim.AdamW(parameters, lr=hparams.lr, weight_decay=0.0)
    config = loss.replace(clip_coef=hparams.clip_coef, beta=hparams.beta)
    steps = []
    for _ in range(hparams.update_epochs):
        for minibatch in range(max(row.minibatch for row in rows) + 1):
            at = [i for i, row in enumerate(rows) if row.minibatch == minibatch]
            value, _ = policy_loss(
                table([rows[i] for i in at]),
                old[at],
                mask[at],
                advantages[at],
                ref[at],
                config=config,
                sampler_logprobs=None if exact_sampler else sampler[at],
            )
            value.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, hparams.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            steps.append((float(value.detach()), float(norm)))
    return weights(cohort, slot), np.mean(steps, axis=0)
