"""The loss of every token before averaging, and the metrics read off it; pure.

A loss names its metrics in the table of `evo_grpo.objective.losses`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenTerms:
    """The loss of every token before averaging; all but `loss` are detached.

    Attributes:
        loss: (B, T) float32 or wider; 0 where masked.
        ratio: (B, T) new / old policy at the level in force, at most exp(80); 1 where masked.
        kl: (B, T) nats, the k3 estimate with its bias correction if any, without beta; 0 where
            masked or where beta is 0. None when no row has a KL term.
        clipped_low: (B, T) bool, the lower bound took the gradient away.
        clipped_high: (B, T) bool, the upper bound took the gradient away (cispo: capped it).
        coefficient: (B, T) factor on advantage x log-prob of cispo and vespo, else None.
    """

    loss: Tensor
    ratio: Tensor
    kl: Tensor | None
    clipped_low: Tensor
    clipped_high: Tensor
    coefficient: Tensor | None = None

    def rows(self, index: slice | Tensor) -> TokenTerms:
        """Return the terms of some rows, for instance of one agent."""
        return TokenTerms(
            loss=self.loss[index],
            ratio=self.ratio[index],
            kl=None if self.kl is None else self.kl[index],
            clipped_low=self.clipped_low[index],
            clipped_high=self.clipped_high[index],
            coefficient=None if self.coefficient is None else self.coefficient[index],
        )


class MaskedMeans:
    """Means over the valid tokens; 0 where there is none.

    Args:
        valid: (B, T) bool.
        per_row: Whether every row counts once, as at sequence level.
    """

    def __init__(self, valid: Tensor, *, per_row: bool) -> None:
        """Keep the mask."""
        self.valid = valid
        self.per_row = per_row

    def row_means(self, values: Tensor) -> Tensor:
        """Return the mean of each row, (B, T) -> (B,)."""
        return self._sum(values, -1) / self.valid.sum(-1).clamp(min=1)

    def token_mean(self, values: Tensor) -> Tensor:
        """Return the mean over all tokens, (B, T) -> ()."""
        return self._sum(values, (0, 1)) / self.valid.sum().clamp(min=1)

    def level_mean(self, values: Tensor) -> Tensor:
        """Return the mean over tokens, or over rows at sequence level, (B, T) -> ()."""
        return self.row_means(values).mean() if self.per_row else self.token_mean(values)

    def _sum(self, values: Tensor, dim: int | tuple[int, int]) -> Tensor:
        floats = values if values.is_floating_point() else values.float()
        return torch.where(self.valid, floats, 0).sum(dim)


def ratio_metrics(terms: TokenTerms, means: MaskedMeans) -> dict[str, Tensor]:
    """Return what every loss reports: the ratio, and the KL divergences in nats."""
    ratio = terms.ratio
    metrics = {
        "ratio/mean": means.token_mean(ratio),
        "ratio/min": torch.where(means.valid, ratio, torch.inf).amin(),
        "ratio/max": torch.where(means.valid, ratio, 0).amax(),
        "approx_kl": means.token_mean(ratio - 1 - ratio.log()),
    }
    if terms.kl is not None:
        metrics["kl"] = means.token_mean(terms.kl)
    return metrics


def clip_metrics(terms: TokenTerms, means: MaskedMeans) -> dict[str, Tensor]:
    """Return the fractions clipped, for the losses that clip the ratio."""
    low, high = terms.clipped_low, terms.clipped_high
    return {
        "clip_ratio/low_mean": means.level_mean(low),
        "clip_ratio/high_mean": means.level_mean(high),
        "clip_ratio/region_mean": means.level_mean(low | high),
        "clip_ratio/low_min": means.row_means(low).amin(),
        "clip_ratio/high_max": means.row_means(high).amax(),
    }


def cap_metrics(terms: TokenTerms, means: MaskedMeans) -> dict[str, Tensor]:
    """Return the fraction capped, for cispo."""
    return {"cispo_clip_ratio": means.level_mean(terms.clipped_high)}


def weight_metrics(terms: TokenTerms, means: MaskedMeans) -> dict[str, Tensor]:
    """Return the mean weight of a row, for vespo."""
    if terms.coefficient is None:
        return {}
    return {"vespo/phi_seq_mean": means.row_means(terms.coefficient).mean()}


def no_metrics(terms: TokenTerms, means: MaskedMeans) -> dict[str, Tensor]:
    """Return nothing, for losses that report no more than the ratio."""
    del terms, means  # one signature for the table
    return {}
