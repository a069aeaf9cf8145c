"""Sums each agent's metrics over a learn call; the sums stay on the device until its end."""

from __future__ import annotations

import torch
from torch import Tensor

from evo_grpo.learn.objective.losses import TokenTerms
from evo_grpo.learn.packing import MicroBatch


class MetricSums:
    """Each agent's metrics of a learn call, summed in `values`, maxima in `peaks`, on the device.

    `values` and `peaks` map a metric's name to (N,) float64.
    """

    def __init__(self, agents: int, device: torch.device) -> None:
        self.agents = agents
        self.device = device
        self.values: dict[str, Tensor] = {}
        self.peaks: dict[str, Tensor] = {}

    def copy(self) -> MetricSums:
        """Return a copy of the sums and maxima."""
        sums = MetricSums(self.agents, self.device)
        sums.put_back(self)
        return sums

    def put_back(self, other: MetricSums) -> None:
        """Replace the sums and maxima by copies of those of `other`."""
        self.values = {name: value.clone() for name, value in other.values.items()}
        self.peaks = {name: value.clone() for name, value in other.peaks.items()}

    def _of(self, totals: dict[str, Tensor], name: str) -> Tensor:
        if name not in totals:
            totals[name] = torch.zeros(self.agents, dtype=torch.float64, device=self.device)
        return totals[name]

    def add(self, name: str, positions: Tensor, per_row: Tensor) -> None:
        """Add each row's value in `per_row` (B,) to the sum `name` of its agent in `positions`."""
        values = per_row.detach().to(torch.float64)
        # Unlike index_add_, it adds in a fixed order on CUDA too.
        self._of(self.values, name).index_put_((positions,), values, accumulate=True)

    def peak(self, name: str, positions: Tensor, per_row: Tensor) -> None:
        """Raise each agent's maximum `name` to the largest value in `per_row` (B,) of its rows."""
        total = self._of(self.peaks, name)
        total.scatter_reduce_(0, positions, per_row.detach().to(torch.float64), "amax")


def start_metrics(rows: int, live: int) -> dict[str, float]:
    """Return an agent's metrics before its first step; `live` of its `rows` have a gradient."""
    return {
        "grad_norm": 0.0,
        "updates": 0.0,
        "failed": 0.0,
        "rows": float(rows),
        "skipped_rows": float(rows - live),
    }


def measure(
    sums: MetricSums,
    batch: MicroBatch,
    terms: TokenTerms,
    weights: Tensor,
    entropies: Tensor,
    flat: Tensor,
    *,
    first: bool,
) -> None:
    """Add the metrics of one micro-batch to `sums`.

    `weights` (B, C) is each token's weight in the loss. `entropies` (B, C) and the log-probs `flat`
    (M,) are in nats, for the generated tokens. `first` is True before any update, while the policy
    is still the one that sampled the rows.
    """
    mask, positions, tokens = batch.mask, batch.positions, batch.mask.sum(-1)
    zero = torch.zeros((), device=mask.device)

    def total(values: Tensor) -> Tensor:
        return torch.where(mask, values.detach(), zero.to(values.dtype)).sum(-1)

    sums.add("loss", positions, total(weights * terms.loss))
    sums.add("tokens", positions, tokens)
    sums.add("clip_low", positions, (terms.clipped_low & mask).sum(-1))
    sums.add("clip_high", positions, (terms.clipped_high & mask).sum(-1))
    sums.add("entropy", positions, total(entropies))
    sums.peak("ratio_max", positions, torch.where(mask, terms.ratio.detach(), zero).amax(-1))
    if terms.kl is not None:
        has_reference = [row.ref is not None for row in batch.rows]
        sums.add("kl", positions, total(terms.kl))
        sums.add("kl_tokens", positions, tokens * mask.new_tensor(has_reference))
    has_sampler = [row.sampler_logprobs is not None for row in batch.rows]
    if first and any(has_sampler):
        logprobs, is_recorded = batch.pad(flat.detach()), mask.new_tensor(has_sampler)
        gap = total((logprobs - batch.sampler_logprobs(logprobs)).abs())
        sums.add("sampler_gap", positions, torch.where(is_recorded, gap, 0))
        sums.add("compared_tokens", positions, tokens * is_recorded)


def finish(sums: MetricSums, metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    """Turn the sums into means per token or step, and add them to each agent's metrics."""
    named = {**sums.values, **sums.peaks}
    table = torch.stack([*named.values()], dim=1).tolist() if named else [()] * sums.agents
    for row, entry in zip(table, metrics, strict=True):
        values = dict(zip(named, row, strict=True))
        tokens = max(1.0, values.get("tokens", 0.0))
        steps = max(1.0, entry["updates"] + entry["failed"])
        entry["grad_norm"] /= steps
        entry["loss"] = values.get("loss", 0.0) / steps
        for name in ("clip_low", "clip_high", "entropy"):
            entry[name] = values.get(name, 0.0) / tokens
        if values.get("kl_tokens"):  # not computed for beta 0, nor without rows to learn from
            entry["kl"] = values["kl"] / tokens
        entry["clip_fraction"] = entry["clip_low"] + entry["clip_high"]
        entry["ratio_max"] = values.get("ratio_max", 0.0)
        compared = values.get("compared_tokens", 0.0)
        if compared or not values.get("tokens"):
            entry["sampler_gap"] = values.get("sampler_gap", 0.0) / max(1.0, compared)
    return metrics
