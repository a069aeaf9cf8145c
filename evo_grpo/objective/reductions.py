"""How token losses are averaged: the weight of each token in the sum over all; pure.

A loss names its reduction in the table of `evo_grpo.objective.losses`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from evo_grpo.errors import ConfigError


@dataclass(frozen=True)
class Totals:
    """The denominators of one optimizer step.

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
