"""The learning-rate schedule, a pure function of the step: a warm-up, then a cosine."""

from __future__ import annotations

import math

from evo_grpo.settings.algorithm import LRSchedule


def lr_factor(schedule: LRSchedule, step: int, warmup: float | None = None) -> float:
    """Return the factor in (0, 1] on an agent's lr in a GRPO step (0-based).

    `warmup` is the share of steps that warm up, in [0, 1); None takes the schedule's. The cosine is
    that of Loshchilov and Hutter 2016, arXiv:1608.03983. After the end the factor keeps its last
    value.
    """
    share = schedule.warmup_proportion if warmup is None else warmup
    warm = math.ceil(share * schedule.steps)
    if step < warm:
        return (step + 1) / warm
    decay_steps = max(1, schedule.steps - warm)
    # The last step still moves: the cosine reaches zero one step after the end.
    progress = min(step - warm, decay_steps - 1) / decay_steps
    return 0.5 * (1 + math.cos(math.pi * progress))
