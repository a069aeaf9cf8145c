"""Losses of a batch whose rows have different losses; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from evo_grpo.learn.objective.losses import LossValues, TokenTerms, token_terms, token_weights
from evo_grpo.settings.loss import LossConfig


def token_terms_of(
    configs: Sequence[LossConfig],
    logprobs: Tensor,
    given: Mapping[str, Tensor | None],
    values: LossValues,
) -> TokenTerms:
    """Compute `token_terms` of rows that may have different losses; rows stay independent.

    `configs` has the settings of each of the B rows, and `given` the other arguments of
    `token_terms` by name: None, or tensors with B rows. `logprobs` are (B, T) floats, nats, with
    gradient.
    """
    kinds = list(dict.fromkeys(configs))
    if len(kinds) == 1:
        whole_batch: dict[str, Any] = dict(given)
        return token_terms(logprobs, **whole_batch, config=kinds[0], values=values)
    order: list[Tensor] = []
    parts: list[TokenTerms] = []
    for kind in kinds:
        own = [row for row, config in enumerate(configs) if config == kind]
        rows = torch.tensor(own, device=logprobs.device)
        chosen: dict[str, Any] = {
            name: None if one is None else one[rows] for name, one in given.items()
        }
        its_values = LossValues(
            **{
                field.name: value[rows] if isinstance(value, Tensor) else value
                for field in fields(values)
                for value in (getattr(values, field.name),)
            }
        )
        parts.append(token_terms(logprobs[rows], **chosen, config=kind, values=its_values))
        order.append(rows)
    back = torch.cat(order).argsort()

    def whole(name: str) -> Tensor | None:
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else torch.cat(found)[back]

    return TokenTerms(**{field.name: whole(field.name) for field in fields(TokenTerms)})  # pyright: ignore[reportArgumentType] -- None for kl alone


def token_weights_of(
    configs: Sequence[LossConfig], mask: Tensor, *, num_rows: Tensor, num_tokens: Tensor
) -> Tensor:
    """Compute `token_weights` of rows that may have different losses; `configs` has one per row."""
    found: Tensor | None = None
    for kind in dict.fromkeys(configs):
        weights = token_weights(
            kind.loss_type,
            mask,
            num_rows=num_rows,
            num_tokens=num_tokens,
            max_completion_length=kind.max_completion_length,
        )
        own = [[config == kind] for config in configs]
        found = weights if found is None else torch.where(mask.new_tensor(own), weights, found)
    assert found is not None, "a batch has a row"
    return found
