"""One learn call for any set of agents.

One forward and backward per micro-batch over all their rows, one AdamW each.

Old log-probs. A step's first minibatch sees the unchanged policy, so its old log-probs are its
own, detached: no second forward, and a ratio of exactly 1 even with LoRA dropout. Later epochs
reuse them. Only minibatches after the first need a pass of their own, made before the first update.
A row keeps its dropout masks for the whole call: a ratio compares two policies, not two masks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from evo_grpo.learner.metrics import MetricSums, finish, measure, start_metrics
from evo_grpo.learner.minibatches import StepTotals, assign_minibatches, shape_rows
from evo_grpo.learner.options import Learning
from evo_grpo.learner.packing import pack
from evo_grpo.learner.rows import AgentBatch, MicroBatch, Row, collate
from evo_grpo.model.forward.dropout import Dropout
from evo_grpo.model.forward.layout import RowLayout
from evo_grpo.model.forward.train import TrainForward, open_forward
from evo_grpo.model.host_memory import keep_freed_memory
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.objective.losses import TokenTerms, token_terms, token_weights
from evo_grpo.objective.ratios import kl_term
from evo_grpo.objective.shaping import token_advantages
from evo_grpo.seeding import derive
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS, AlgorithmConfig
from evo_grpo.settings.engine import EngineConfig


class Learner:
    """Trains any set of agents at once over one base.

    Args:
        slots: The adapters.
        algorithm: The loss and the shaping of advantages, which all agents share; what an agent
            trains with comes with each call.
        engine: The bounds of a micro-batch, and gradient checkpointing.
        specialized: False to run every model through its own modules.
    """

    def __init__(
        self,
        slots: AdapterSlots,
        algorithm: AlgorithmConfig,
        engine: EngineConfig,
        *,
        specialized: bool = True,
    ) -> None:
        """Keep the pieces."""
        self._specialized = specialized
        self.slots = slots
        self.base = slots.base
        self.algorithm = algorithm
        self.engine = engine
        self.loss = algorithm.loss(algorithm.max_output_tokens or DEFAULT_OUTPUT_TOKENS)
        self._tokens = engine.max_tokens_per_microbatch or self.base.micro_batch_tokens
        if self.base.device.type == "cpu":
            keep_freed_memory()

    def learn(
        self, agents: Sequence[Learning], batches: Sequence[AgentBatch], *, seed: int
    ) -> list[dict[str, float]]:
        """Take every agent's optimizer steps on its rows.

        Args:
            agents: N agents.
            batches: Their rows, in the same order; an agent may have none.
            seed: Stream of minibatch order and dropout.

        Returns:
            Per agent: loss, kl, clip_fraction, clip_low, clip_high, ratio_max, entropy, grad_norm,
            sampler_gap, updates (optimizer steps taken), rows (as given), skipped_rows (no
            gradient: filtered, or zero advantage and no KL), failed (1 when a gradient was not
            finite: that step was not taken).
        """
        sums = MetricSums(len(agents), self.base.device)
        given = [len(b.rows) for b in batches]
        batches = [AgentBatch(b.agent, shape_rows(b.rows, self.algorithm)) for b in batches]
        for agent, batch in zip(agents, batches, strict=True):
            assign_minibatches(batch.rows, agent.hparams, derive(seed, "order", batch.agent))
        totals = [StepTotals.of(batch.rows) for batch in batches]
        live = [
            [(i, row) for row in batch.rows if row.advantage != 0.0 or agent.hparams.beta > 0]
            for i, (agent, batch) in enumerate(zip(agents, batches, strict=True))
        ]
        metrics = [start_metrics(count, len(rows)) for count, rows in zip(given, live, strict=True)]
        everything = [pair for pairs in live for pair in pairs]
        self._old_pass(agents, [p for p in everything if p[1].minibatch > 0], seed)
        for epoch in range(max((a.hparams.update_epochs for a in agents), default=0)):
            for minibatch in range(max((t.minibatches for t in totals), default=0)):
                pairs = [
                    p
                    for p in everything
                    if p[1].minibatch == minibatch and epoch < agents[p[0]].hparams.update_epochs
                ]
                if pairs:
                    step = (epoch, minibatch)
                    self._step(
                        agents, totals, pairs, step=step, seed=seed, sums=sums, metrics=metrics
                    )
        return finish(sums, metrics)

    def limit_output(self, longest: int) -> None:
        """Take the longest completion in force, which dr_grpo divides by."""
        self.loss = self.algorithm.loss(longest)

    def _step(
        self,
        agents: Sequence[Learning],
        totals: Sequence[StepTotals],
        pairs: list[tuple[int, Row]],
        *,
        step: tuple[int, int],
        seed: int,
        sums: MetricSums,
        metrics: list[dict[str, float]],
    ) -> None:
        """Accumulate gradients over micro-batches, then let each agent's own optimizer step."""
        rows_total = torch.tensor(
            [float(t.rows[step[1]]) if step[1] < t.minibatches else 1.0 for t in totals]
        )
        tokens_total = torch.tensor(
            [float(t.tokens[step[1]]) if step[1] < t.minibatches else 1.0 for t in totals]
        )
        present = sorted({agent for agent, _ in pairs})
        forward = self._open([agents[agent].adapter for agent in present])
        reference = self._open([agents[agent].reference for agent in present])
        for bucket in pack(pairs, self._tokens, self.engine.max_rows_per_microbatch):
            batch = collate(bucket, self.base.pad_id, self.base.device)
            dropout = self._dropout(agents, batch, derive(seed, "dropout"))
            layout = RowLayout(tuple(agents[a].adapter for a in batch.present), batch.counts)
            self._reference(agents, batch, reference)
            # The context spans the backward: gradient checkpointing runs the forward again there.
            with forward.rows(layout, dropout):
                flat, entropy = self._logprobs(agents, batch, forward)
                if step[0] == 0 and step[1] == 0:
                    batch.scatter("old", flat, [True] * len(batch.rows))
                terms, weights = self._terms(agents, batch, flat, rows_total, tokens_total)
                torch.where(batch.mask, weights * terms.loss, 0.0).sum().backward()
            measure(sums, batch, terms, weights, entropy, flat, first=step == (0, 0))
        forward.collect_gradients()
        self._update(agents, present, metrics)

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
        loss, shaped_by_kl = self.loss, self.algorithm.kl_shaping
        betas = column([a.hparams.beta for a in agents])
        logprobs, reference, kl = batch.pad(flat), None, None
        if any(row.ref is not None for row in batch.rows):
            reference = batch.gather("ref")
        if shaped_by_kl:
            kl = kl_term(logprobs.detach(), reference, batch.mask, betas)
        terms = token_terms(
            logprobs,
            batch.gather("old"),
            batch.mask,
            self._advantages(agents, batch, logprobs, kl),
            reference,
            config=loss,
            clip_low=column([low for low, _ in bounds]),
            clip_high=column([high for _, high in bounds]),
            # KL shaping moves the KL into the advantages; the penalty would count it twice.
            beta=0.0 if shaped_by_kl else betas,
        )
        if kl is not None:
            terms = replace(terms, kl=kl)
        weights = token_weights(
            loss.loss_type,
            batch.mask,
            num_rows=rows_total.to(device)[mine][:, None],
            num_tokens=tokens_total.to(device)[mine][:, None],
            max_completion_length=loss.max_completion_length,
        )
        return terms, weights

    def _advantages(
        self,
        agents: Sequence[Learning],
        batch: MicroBatch,
        logprobs: Tensor,
        kl: Tensor | None,
    ) -> Tensor:
        """Advantages (B,), or (B, C) where they are shaped per token."""
        values = torch.tensor(
            [row.advantage for row in batch.rows], device=logprobs.device, dtype=logprobs.dtype
        )
        use_kl, clip_range = self.algorithm.kl_shaping, self.algorithm.adv_clip_range
        if not use_kl and clip_range is None:
            return values
        parts: list[Tensor] = []
        for agent, rows in zip(batch.present, batch.slices(), strict=True):
            beta = agents[agent].hparams.beta
            shaped, _ = token_advantages(
                values[rows],
                batch.mask[rows],
                kl=None if kl is None else kl[rows],
                beta=beta,
                clip_range=clip_range,
                use_kl_shaping=use_kl and beta > 0 and kl is not None,
            )
            parts.append(shaped)
        return torch.cat(parts)

    def _open(self, adapters: Sequence[str | None]) -> TrainForward:
        recompute = self.engine.gradient_checkpointing
        return open_forward(
            self.slots, adapters, recompute=recompute, specialized=self._specialized
        )

    def _logprobs(
        self, agents: Sequence[Learning], batch: MicroBatch, forward: TrainForward
    ) -> tuple[Tensor, Tensor]:
        """Log-probs (M,) and entropies (M,) of the generated tokens."""
        picked = forward.hidden_at(batch.input_ids, batch.where, batch.prefix)
        per_row = torch.tensor([agents[a].hparams.temperature for a in batch.agents.tolist()])
        lengths = torch.tensor([row.generated for row in batch.rows])
        temperature = per_row.repeat_interleave(lengths).to(picked.device)
        return self.base.token_logprobs(picked, batch.targets, temperature)

    @torch.no_grad()
    def _old_pass(
        self, agents: Sequence[Learning], pairs: list[tuple[int, Row]], seed: int
    ) -> None:
        """Log-probs before the first update, for rows whose turn comes after it."""
        present = sorted({agent for agent, _ in pairs})
        forward = self._open([agents[agent].adapter for agent in present])
        for bucket in pack(pairs, self._tokens, self.engine.max_rows_per_microbatch):
            batch = collate(bucket, self.base.pad_id, self.base.device)
            dropout = self._dropout(agents, batch, derive(seed, "dropout"))
            layout = RowLayout(tuple(agents[a].adapter for a in batch.present), batch.counts)
            with forward.rows(layout, dropout):
                flat, _ = self._logprobs(agents, batch, forward)
            batch.scatter("old", flat, [True] * len(batch.rows))

    @torch.no_grad()
    def _reference(
        self, agents: Sequence[Learning], batch: MicroBatch, forward: TrainForward
    ) -> None:
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
        part = batch if all(wanted) else collate(pairs, self.base.pad_id, self.base.device)
        layout = RowLayout(tuple(agents[a].reference for a in part.present), part.counts)
        with forward.rows(layout):
            flat, _ = self._logprobs(agents, part, forward)
        part.scatter("ref", flat, [True] * len(part.rows))

    def _update(
        self, agents: Sequence[Learning], present: Sequence[int], metrics: list[dict[str, float]]
    ) -> None:
        """Clip and step each agent alone; one whose gradient is not finite keeps its weights."""
        grads = [
            [p.grad for p in self.slots.parameters(agents[i].adapter) if p.grad is not None]
            for i in present
        ]
        norms = _norms(grads)
        for i, mine, norm in zip(present, grads, norms, strict=True):
            entry, most = metrics[i], agents[i].hparams.max_grad_norm
            entry["grad_norm"] += norm
            if math.isfinite(norm):
                if most is not None and norm > most:
                    torch._foreach_mul_(mine, most / (norm + 1e-6))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage] -- one launch, and no public name
                agents[i].optimizer.step()
                self.slots.mark_changed(agents[i].adapter)
                entry["updates"] += 1
            else:
                entry["failed"] = 1.0
            agents[i].optimizer.zero_grad(set_to_none=True)

    def _dropout(self, agents: Sequence[Learning], batch: MicroBatch, seed: int) -> Dropout | None:
        rates = [self.slots.lora_config(agents[a].adapter).lora_dropout for a in batch.present]
        if not any(rates):
            return None
        owners = [agents[a].adapter for a in batch.agents.tolist()]
        return Dropout(
            tuple(derive(seed, a, row.number) for a, row in zip(owners, batch.rows, strict=True))
        )


def _norms(grads: Sequence[list[Tensor]]) -> list[float]:
    """Return the norm of each agent's gradients, with one host sync for all."""
    flat = torch._foreach_norm([g for mine in grads for g in mine])  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage] -- as above
    parts = torch.stack(flat).split([len(mine) for mine in grads])
    return torch.stack([torch.linalg.vector_norm(part) for part in parts]).tolist()
