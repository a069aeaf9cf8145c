"""The learning-rate schedule: warm up, then a cosine; a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from evo_grpo.validation import number, plain_number, whole


@dataclass(frozen=True)
class CosineLRScheduleConfig:
    """Linear warm-up followed by a cosine decay to zero.

    The cosine is that of Loshchilov and Hutter 2016, arXiv:1608.03983. A factor on the agent's own
    lr: when lr mutates, the place in the schedule stays.

    Attributes:
        num_epochs: GRPO steps until the end, >= 1.
        warmup_proportion: Share of them that warms up, in [0, 1).
    """

    num_epochs: int
    warmup_proportion: float = 0.05

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for name in ("num_epochs", "warmup_proportion"):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        whole(1, "it counts GRPO steps").check("num_epochs", self.num_epochs)
        number(lambda v: 0 <= v < 1, "a share in [0, 1)").check(
            "warmup_proportion", self.warmup_proportion
        )

    def factor(self, step: int) -> float:
        """Return what multiplies lr in a GRPO step.

        Args:
            step: 0-based; beyond the end the factor stays at its last value.

        Returns:
            A number in (0, 1].
        """
        warm = math.ceil(self.warmup_proportion * self.num_epochs)
        if step < warm:
            return (step + 1) / warm
        rest = max(1, self.num_epochs - warm)
        # The last step still moves: the cosine reaches zero one step after the end.
        place = min(step - warm, rest - 1) / rest
        return 0.5 * (1 + math.cos(math.pi * place))
