"""One learn call for any set of agents: one forward and backward per micro-batch over all their rows, one AdamW each.

Old log-probs. A step's first minibatch sees the unchanged policy, so its old log-probs are its own, detached: no second
forward, and a ratio of exactly 1 even with LoRA dropout. Later epochs reuse them. Only minibatches after the first need
a pass of their own, made before the first update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from evo_grpo.grpo.batch import AgentBatch, MicroBatch, Row, collate, pack
from evo_grpo.grpo.loss import LossConfig, TokenTerms, token_terms, token_weights
from evo_grpo.hparams import Hparams
from evo_grpo.model.adapters import AdapterSlots
from evo_grpo.model.fused import Dropout, RowLayout, population_forward
from evo_grpo.seeding import derive, generator


@dataclass
class Learning:
    """What the learner needs to know of one agent.

    Attributes:
        adapter: Trained slot.
        reference: Slot of its frozen reference, or None for the base with adapters off.
        hparams: Its hyperparameters.
        optimizer: Over the trained slot's parameters alone.
    """

    adapter: str
    reference: str | None
    hparams: Hparams
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class LearnOptions:
    """What all agents of a population share.

    Attributes:
        loss: Loss type and its options; clip_coef and beta in it are overridden per agent.
        token_budget: Padded tokens per micro-batch.
        max_rows: Rows per micro-batch, None for no such bound.
        gradient_checkpointing: Recompute activations in the backward pass.
    """

    loss: LossConfig = field(default_factory=LossConfig)
    token_budget: int = 8192
    max_rows: int | None = None
    gradient_checkpointing: bool = False


class _Sums:
    """Per-agent sums of metrics over micro-batches, kept on the device until the end of the call."""

    def __init__(self, agents: int, device: torch.device) -> None:
        self.agents = agents
        self.device = device
        self.values: dict[str, Tensor] = {}
        self.peaks: dict[str, Tensor] = {}

    def add(self, name: str, agents: Tensor, per_row: Tensor) -> None:
        total = self.values.setdefault(
            name, torch.zeros(self.agents, dtype=torch.float64, device=self.device)
        )
        total.index_add_(0, agents, per_row.detach().to(torch.float64))

    def peak(self, name: str, agents: Tensor, per_row: Tensor) -> None:
        total = self.peaks.setdefault(
            name, torch.zeros(self.agents, dtype=torch.float64, device=self.device)
        )
        total.scatter_reduce_(0, agents, per_row.detach().to(torch.float64), "amax")


class Learner:
    """Trains any set of agents at once over one base.

    Args:
        slots: The adapters.
        options: What all agents share.
    """

    def __init__(self, slots: AdapterSlots, options: LearnOptions) -> None:
        """Keep the pieces."""
        self.slots = slots
        self.base = slots.base
        self.options = options

    def learn(
        self, agents: Sequence[Learning], batches: Sequence[AgentBatch], *, seed: int
    ) -> list[dict[str, float]]:
        """Take every agent's optimizer steps on its rows.

        Args:
            agents: N agents.
            batches: Their rows, in the same order; an agent may have none.
            seed: Stream of minibatch order and dropout.

        Returns:
            Per agent: loss, kl, clip_fraction, clip_low, clip_high, ratio_max, entropy, grad_norm, sampler_gap,
            updates (optimizer steps taken), skipped_rows (no gradient: zero advantage and no KL), failed (1 when a
            gradient was not finite: that step was not taken).
        """
        sums = _Sums(len(agents), self.base.device)
        for agent, batch in zip(agents, batches, strict=True):
            _assign_minibatches(batch.rows, agent.hparams, derive(seed, "order", batch.agent))
        totals = [_Totals.of(batch.rows) for batch in batches]
        live = [
            [(i, row) for row in batch.rows if row.advantage != 0.0 or agent.hparams.beta > 0]
            for i, (agent, batch) in enumerate(zip(agents, batches, strict=True))
        ]
        metrics = [_start(batch.rows, rows) for batch, rows in zip(batches, live, strict=True)]
        everything = [pair for pairs in live for pair in pairs]
        with self._mode():
            self._old_pass(agents, [p for p in everything if p[1].minibatch > 0], seed)
            for epoch in range(max((a.hparams.update_epochs for a in agents), default=0)):
                for minibatch in range(max((t.minibatches for t in totals), default=0)):
                    pairs = [
                        p
                        for p in everything
                        if p[1].minibatch == minibatch
                        and epoch < agents[p[0]].hparams.update_epochs
                    ]
                    if pairs:
                        step = (epoch, minibatch)
                        self._step(
                            agents, totals, pairs, step=step, seed=seed, sums=sums, metrics=metrics
                        )
        return _finish(sums, metrics)

    def _step(  # noqa: PLR0913 -- one optimizer step, called from one place
        self,
        agents: Sequence[Learning],
        totals: Sequence[_Totals],
        pairs: list[tuple[int, Row]],
        *,
        step: tuple[int, int],
        seed: int,
        sums: _Sums,
        metrics: list[dict[str, float]],
    ) -> None:
        """Accumulate gradients over micro-batches, then let each agent's own optimizer step."""
        rows_total = torch.tensor(
            [float(t.rows[step[1]]) if step[1] < t.minibatches else 1.0 for t in totals]
        )
        tokens_total = torch.tensor(
            [float(t.tokens[step[1]]) if step[1] < t.minibatches else 1.0 for t in totals]
        )
        for index, bucket in enumerate(
            pack(pairs, self.options.token_budget, self.options.max_rows)
        ):
            batch = collate(bucket, self.base.pad_id, self.base.device)
            dropout = self._dropout(agents, batch, derive(seed, "dropout", step[0], step[1], index))
            layout = RowLayout(tuple(agents[a].adapter for a in batch.present), batch.counts)
            self._reference(agents, batch)
            # The context spans the backward: gradient checkpointing runs the patched forward again there.
            with population_forward(self.slots.layers, layout, dropout=dropout):
                flat, entropy = self._logprobs(agents, batch)
                if step[0] == 0 and step[1] == 0:
                    batch.scatter("old", flat, [True] * len(batch.rows))
                terms, weights = self._terms(agents, batch, flat, rows_total, tokens_total)
                torch.where(batch.mask, weights * terms.loss, 0.0).sum().backward()
            _measure(sums, batch, terms, weights, entropy, flat, first=step == (0, 0))
        self._update(agents, sorted({a for a, _ in pairs}), metrics)

    def _terms(
        self,
        agents: Sequence[Learning],
        batch: MicroBatch,
        flat: Tensor,
        rows_total: Tensor,
        tokens_total: Tensor,
    ) -> tuple[TokenTerms, Tensor]:
        device = batch.mask.device
        mine = batch.agents

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, device=device, dtype=flat.dtype)[mine][:, None]

        bounds = [a.hparams.clip_bounds for a in agents]
        advantages = torch.tensor(
            [row.advantage for row in batch.rows], device=device, dtype=flat.dtype
        )
        loss = self.options.loss
        terms = token_terms(
            batch.pad(flat),
            batch.gather("old"),
            batch.mask,
            advantages,
            batch.gather("ref") if any(row.ref is not None for row in batch.rows) else None,
            config=loss,
            clip_low=column([low for low, _ in bounds]),
            clip_high=column([high for _, high in bounds]),
            beta=column([a.hparams.beta for a in agents]),
        )
        weights = token_weights(
            loss.loss_type,
            batch.mask,
            num_rows=rows_total.to(device)[mine][:, None],
            num_tokens=tokens_total.to(device)[mine][:, None],
            max_completion_length=loss.max_completion_length,
        )
        return terms, weights

    def _logprobs(self, agents: Sequence[Learning], batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs (M,) and entropies (M,) of the generated tokens, through whatever forward is in force."""
        hidden = self.base.hidden(batch.input_ids)
        picked = hidden.flatten(0, 1).index_select(0, batch.where)
        per_row = torch.tensor([agents[a].hparams.temperature for a in batch.agents.tolist()])
        lengths = torch.tensor([row.generated for row in batch.rows])
        temperature = per_row.repeat_interleave(lengths).to(hidden.device)
        return self.base.token_logprobs(picked, batch.targets, temperature)

    @torch.no_grad()
    def _old_pass(
        self, agents: Sequence[Learning], pairs: list[tuple[int, Row]], seed: int
    ) -> None:
        """Log-probs before the first update, for rows whose turn comes after it."""
        for index, bucket in enumerate(
            pack(pairs, self.options.token_budget, self.options.max_rows)
        ):
            batch = collate(bucket, self.base.pad_id, self.base.device)
            dropout = self._dropout(agents, batch, derive(seed, "dropout", "old", index))
            layout = RowLayout(tuple(agents[a].adapter for a in batch.present), batch.counts)
            with population_forward(self.slots.layers, layout, dropout=dropout):
                flat, _ = self._logprobs(agents, batch)
            batch.scatter("old", flat, [True] * len(batch.rows))

    @torch.no_grad()
    def _reference(self, agents: Sequence[Learning], batch: MicroBatch) -> None:
        """Fill in missing reference log-probs of the rows whose agent has a KL term."""
        wanted = [
            agents[a].hparams.beta > 0 and row.ref is None
            for a, row in zip(batch.agents.tolist(), batch.rows, strict=True)
        ]
        if not any(wanted):
            return
        # One forward serves all: rows of agents without a reference slot go through the base alone.
        pairs = [
            (a, row)
            for a, row, w in zip(batch.agents.tolist(), batch.rows, wanted, strict=True)
            if w
        ]
        part = collate(pairs, self.base.pad_id, self.base.device)
        layout = RowLayout(tuple(agents[a].reference for a in part.present), part.counts)
        with population_forward(self.slots.layers, layout):
            flat, _ = self._logprobs(agents, part)
        part.scatter("ref", flat, [True] * len(part.rows))

    def _update(
        self, agents: Sequence[Learning], present: Sequence[int], metrics: list[dict[str, float]]
    ) -> None:
        """Clip and step each agent by itself; an agent whose gradient is not finite keeps its weights."""
        grads = {
            i: [p.grad for p in self.slots.parameters(agents[i].adapter) if p.grad is not None]
            for i in present
        }
        norms = torch.stack(
            [torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads[i]))) for i in present]
        ).tolist()
        for i, norm in zip(present, norms, strict=True):
            entry = metrics[i]
            entry["grad_norm"] += norm
            if norm == norm and norm != float("inf"):
                torch._foreach_mul_(
                    grads[i], min(1.0, agents[i].hparams.max_grad_norm / (norm + 1e-6))
                )
                agents[i].optimizer.step()
                entry["updates"] += 1
            else:
                entry["failed"] = 1.0
            agents[i].optimizer.zero_grad(set_to_none=True)

    def _dropout(self, agents: Sequence[Learning], batch: MicroBatch, seed: int) -> Dropout | None:
        rates = [self.slots.lora_config(agents[a].adapter).lora_dropout for a in batch.present]
        return Dropout(seed) if any(rates) else None

    @contextmanager
    def _mode(self) -> Iterator[None]:
        """Turn gradient checkpointing on for the layers alone: train() would wake the base's own dropout."""
        if not self.options.gradient_checkpointing:
            yield
            return
        layers: list[nn.Module] = [
            m for m in self.base.trunk.modules() if isinstance(m, GradientCheckpointingLayer)
        ]
        self.base.model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in layers:
                layer.training = False
            self.base.model.gradient_checkpointing_disable()


@dataclass(frozen=True)
class _Totals:
    """Denominators per minibatch of one agent: all its rows and tokens, those that skip the backward too."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def minibatches(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> _Totals:
        count = max((row.minibatch for row in rows), default=-1) + 1
        return cls(
            tuple(sum(row.minibatch == m for row in rows) for m in range(count)),
            tuple(
                max(1, sum(row.generated for row in rows if row.minibatch == m))
                for m in range(count)
            ),
        )


def _assign_minibatches(rows: Sequence[Row], hparams: Hparams, seed: int) -> None:
    size = hparams.batch_size
    for row in rows:
        row.old = row.ref = None
        row.minibatch = 0
    if size is None or size >= len(rows):
        return
    order = generator(seed).permutation(len(rows))
    for place, index in enumerate(order):
        rows[index].minibatch = place // size


def _start(rows: Sequence[Row], live: Sequence[tuple[int, Row]]) -> dict[str, float]:
    return {
        "grad_norm": 0.0,
        "updates": 0.0,
        "failed": 0.0,
        "rows": float(len(rows)),
        "skipped_rows": float(len(rows) - len(live)),
    }


def _measure(  # noqa: PLR0913 -- sums of one micro-batch, called from one place
    sums: _Sums,
    batch: MicroBatch,
    terms: TokenTerms,
    weights: Tensor,
    entropy: Tensor,
    flat: Tensor,
    *,
    first: bool,
) -> None:
    mask, agents = batch.mask, batch.agents
    zero = torch.zeros((), device=mask.device)

    def total(values: Tensor) -> Tensor:
        return torch.where(mask, values.detach(), zero.to(values.dtype)).sum(-1)

    sums.add("loss", agents, total(weights * terms.loss))
    sums.add("tokens", agents, mask.sum(-1))
    sums.add("clip_low", agents, total(terms.clipped_low.float()))
    sums.add("clip_high", agents, total(terms.clipped_high.float()))
    sums.add("entropy", agents, total(batch.pad(entropy)))
    sums.peak("ratio_max", agents, torch.where(mask, terms.ratio.detach(), zero).amax(-1))
    if terms.kl is not None:
        sums.add("kl", agents, total(terms.kl))
    sampled = [row.sampler_logprobs for row in batch.rows]
    if first and all(s is not None for s in sampled):
        seen = torch.cat([torch.from_numpy(s) for s in sampled if s is not None]).to(flat.device)
        sums.add("sampler_gap", agents, total(batch.pad((flat.detach() - seen).abs())))
        sums.add("first_tokens", agents, mask.sum(-1))


def _finish(sums: _Sums, metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    table = {name: value.tolist() for name, value in {**sums.values, **sums.peaks}.items()}
    for i, entry in enumerate(metrics):
        values = {name: column[i] for name, column in table.items()}
        tokens = max(1.0, values.get("tokens", 0.0))
        steps = max(1.0, entry["updates"] + entry["failed"])
        entry["grad_norm"] /= steps
        entry["loss"] = values.get("loss", 0.0) / steps
        for name in ("clip_low", "clip_high", "entropy", "kl"):
            entry[name] = values.get(name, 0.0) / tokens
        entry["clip_fraction"] = entry["clip_low"] + entry["clip_high"]
        entry["ratio_max"] = values.get("ratio_max", 0.0)
        entry["sampler_gap"] = values.get("sampler_gap", 0.0) / max(
            1.0, values.get("first_tokens", 0.0)
        )
    return metrics
