"""The learning-rate schedule: warm up, then a cosine; a pure function of the step."""

from __future__ import annotations

import math

from evo_grpo.settings.algorithm import LRSchedule


def lr_factor(schedule: LRSchedule, step: int) -> float:
    """Return the factor in (0, 1] on an agent's lr in a GRPO step (0-based).

    The cosine is that of Loshchilov and Hutter 2016, arXiv:1608.03983. Beyond the end the factor
    stays at its last value.
    """
    warm = math.ceil(schedule.warmup_proportion * schedule.steps)
    if step < warm:
        return (step + 1) / warm
    rest = max(1, schedule.steps - warm)
    # The last step still moves: the cosine reaches zero one step after the end.
    place = min(step - warm, rest - 1) / rest
    return 0.5 * (1 + math.cos(math.pi * place))
