"""The GRPO losses one token at a time, as the papers write them: slow, obvious, and without torch.

`frozen` are the log-probs that detached factors are computed from. A finite difference moves
`logprobs` and leaves `frozen` in place.
"""

import math


def slow_loss(logprobs, old, mask, advantages, ref, config, *, frozen=None, sampler=None):
    frozen = logprobs if frozen is None else frozen
    old = frozen if old is None else old
    rows, tokens = len(mask), sum(map(sum, mask))
    shaped = isinstance(advantages[0], list)
    if not shaped:
        advantages = [[a] * len(mask[0]) for a in advantages]
    total = 0.0
    for i in range(rows):
        row = [
            slow_token(i, t, logprobs, old, mask, advantages, ref, config, frozen, sampler, shaped)
            for t in range(len(mask[i]))
            if mask[i][t]
        ]
        if config.loss_type in ("grpo", "gspo", "sapo"):
            total += sum(row) / max(len(row), 1) / rows
        elif config.loss_type == "luspo":
            total += sum(row) / rows
        elif config.loss_type == "dr_grpo":
            total += sum(row) / (rows * config.max_completion_length)
        else:
            total += sum(row) / max(tokens, 1)
    return total


def level(config):
    papers = {"gspo": "sequence", "luspo": "sequence"}
    return config.importance_sampling_level or papers.get(config.loss_type, "token")


def slow_ratio(i, t, policy, old, valid, at, others):
    """New over old policy; the gradient of a sequence's ratio reaches the tokens of `others`."""
    if at == "token":
        return math.exp(policy[i][t] - old[i][t])
    # The row's value. Where `others` are frozen, it moves with the token's own log-prob alone, with
    # the weight of all (GSPO-token).
    mean = sum(others[i][s] - old[i][s] for s in valid) / len(valid)
    return math.exp(mean + policy[i][t] - others[i][t])


def slow_token(i, t, logprobs, old, mask, advantages, ref, config, frozen, sampler, shaped):
    lp, advantage = logprobs[i][t], advantages[i][t]
    valid = [s for s in range(len(mask[i])) if mask[i][s]]

    def ratio_of(policy, per_token=shaped):
        return slow_ratio(i, t, policy, old, valid, level(config), frozen if per_token else policy)

    ratio = ratio_of(logprobs)
    low, high = config.clip_bounds
    if config.loss_type == "cispo":
        loss = -min(ratio_of(frozen), high) * advantage * lp
    elif config.loss_type == "sapo":
        tau = config.sapo_temperature_pos if advantage > 0 else config.sapo_temperature_neg
        loss = -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
    elif config.loss_type == "vespo":
        log_w = sum(min(max(frozen[i][s] - old[i][s], -20), 20) for s in valid)
        log_w = min(max(log_w, math.log(1e-8)), 20)
        k, rate = config.vespo_positive if advantage >= 0 else config.vespo_negative
        loss = -math.exp(rate + k * log_w - rate * math.exp(log_w)) * advantage * lp
    else:
        free = ratio if config.delta is None else min(ratio, config.delta)
        loss = -min(free * advantage, min(max(ratio, low), high) * advantage)

    if config.off_policy_mask_threshold is not None:
        origin = old if sampler is None else sampler
        gap = sum(origin[i][s] - frozen[i][s] for s in valid) / len(valid)
        if advantage < 0 and gap > config.off_policy_mask_threshold:
            loss = 0.0
    if sampler is not None and config.loss_type != "vespo":
        loss *= slow_sampler_factor(i, t, old, sampler, valid, config)
    if config.beta:
        gap = ref[i][t] - lp
        kl = math.exp(gap) - gap - 1
        loss += config.beta * kl * (ratio_of(logprobs, True) if config.kl_bias_correction else 1)
    return loss


def slow_sampler_factor(i, t, old, sampler, valid, config):
    if config.sampler_correction == "none":
        return 1.0
    if config.sampler_correction.startswith("token"):
        factor = math.exp(old[i][t] - sampler[i][t])
    else:
        factor = math.exp(sum(old[i][s] - sampler[i][s] for s in valid))
    if factor <= config.sampler_ratio_cap:
        return factor
    return config.sampler_ratio_cap if config.sampler_correction.endswith("truncate") else 0.0


def slow_kinks(logprobs, old, mask, config, *, sampler=None):
    """Distances of what the loss compares from the points where it or its derivative jumps."""
    low, high = config.clip_bounds
    for i in range(len(mask)):
        valid = [s for s in range(len(mask[i])) if mask[i][s]]
        gaps = [logprobs[i][s] - old[i][s] for s in valid]
        for log_ratio in [*gaps, sum(gaps) / max(len(valid), 1)]:
            yield from (
                abs(math.exp(log_ratio) - edge) for edge in (low, high, config.delta or low)
            )
        if config.off_policy_mask_threshold is not None:
            for origin in (old, sampler or old):
                gap = sum(origin[i][s] - logprobs[i][s] for s in valid) / max(len(valid), 1)
                yield abs(gap - config.off_policy_mask_threshold)
        if sampler is not None:
            logs = [old[i][s] - sampler[i][s] for s in valid]
            cap = config.sampler_ratio_cap
            yield from (abs(math.exp(log) - cap) for log in [*logs, sum(logs)])
