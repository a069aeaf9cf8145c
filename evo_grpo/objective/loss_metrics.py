"""The loss of every token before averaging, and the metrics read off it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from evo_grpo.settings.loss import LossConfig, LossType


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


def token_metrics(terms: TokenTerms, mask: Tensor, *, config: LossConfig) -> dict[str, Tensor]:
    """Summarise what the loss did, under the names that TRL logs.

    Args:
        terms: Of the rows to summarise.
        mask: (B, T) bool or 0/1.
        config: What the terms were computed with.

    Returns:
        0-dim detached tensors, left on their device:
        ratio/mean, ratio/min, ratio/max; approx_kl, nats, the k3 estimate of KL(old || new);
        kl, nats against the reference, where there is a KL term;
        clip_ratio/low_mean, high_mean, region_mean: fractions of tokens clipped (of rows at
        sequence level), low_min and high_max: least and greatest fraction in a row;
        cispo_clip_ratio: fraction of tokens capped; vespo/phi_seq_mean: mean weight of a row.
        Empty for an empty batch.
    """
    if not mask.numel():
        return {}
    seen = _Masked(mask != 0, per_row=config.ratio_level == "sequence")
    ratio = terms.ratio
    metrics = {
        "ratio/mean": seen.token_mean(ratio),
        "ratio/min": torch.where(seen.valid, ratio, torch.inf).amin(),
        "ratio/max": torch.where(seen.valid, ratio, 0).amax(),
        "approx_kl": seen.token_mean(ratio - 1 - ratio.log()),
    }
    if terms.kl is not None:
        metrics["kl"] = seen.token_mean(terms.kl)
    if config.loss_type in _METRICS:
        metrics |= _METRICS[config.loss_type](terms, seen)
    return metrics


class _Masked:
    """Means over the valid tokens; 0 where there is none."""

    def __init__(self, valid: Tensor, *, per_row: bool) -> None:
        self.valid = valid
        self.per_row = per_row

    def row_means(self, values: Tensor) -> Tensor:
        """(B, T) -> (B,)."""
        return self._sum(values, -1) / self.valid.sum(-1).clamp(min=1)

    def token_mean(self, values: Tensor) -> Tensor:
        """(B, T) -> ()."""
        return self._sum(values, (0, 1)) / self.valid.sum().clamp(min=1)

    def level_mean(self, values: Tensor) -> Tensor:
        """(B, T) -> (), every row counting once at sequence level."""
        return self.row_means(values).mean() if self.per_row else self.token_mean(values)

    def _sum(self, values: Tensor, dim: int | tuple[int, int]) -> Tensor:
        floats = values if values.is_floating_point() else values.float()
        return torch.where(self.valid, floats, 0).sum(dim)


def _clip_metrics(terms: TokenTerms, seen: _Masked) -> dict[str, Tensor]:
    low, high = terms.clipped_low, terms.clipped_high
    return {
        "clip_ratio/low_mean": seen.level_mean(low),
        "clip_ratio/high_mean": seen.level_mean(high),
        "clip_ratio/region_mean": seen.level_mean(low | high),
        "clip_ratio/low_min": seen.row_means(low).amin(),
        "clip_ratio/high_max": seen.row_means(high).amax(),
    }


def _cap_metrics(terms: TokenTerms, seen: _Masked) -> dict[str, Tensor]:
    return {"cispo_clip_ratio": seen.level_mean(terms.clipped_high)}


def _phi_metrics(terms: TokenTerms, seen: _Masked) -> dict[str, Tensor]:
    if terms.coefficient is None:
        return {}
    return {"vespo/phi_seq_mean": seen.row_means(terms.coefficient).mean()}


_METRICS: Mapping[LossType, Callable[[TokenTerms, _Masked], dict[str, Tensor]]] = {
    "grpo": _clip_metrics,
    "gspo": _clip_metrics,
    "bnpo": _clip_metrics,
    "dr_grpo": _clip_metrics,
    "dapo": _clip_metrics,
    "luspo": _clip_metrics,
    "cispo": _cap_metrics,
    "vespo": _phi_metrics,
}
