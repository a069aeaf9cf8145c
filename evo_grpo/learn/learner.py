"""Trains a set of agents in one learn call.

A micro-batch has rows of all agents and takes one forward and one backward. Each agent has its own
AdamW.

The old log-probs of the first minibatch are its new log-probs, detached, since the policy has not
changed yet. This saves a forward, and the ratio is exactly 1 even with LoRA dropout. For later
minibatches, a separate pass before the first update computes the old log-probs. Later epochs reuse
the old log-probs of the first epoch. Dropout masks of a row stay the same for the whole call, so a
ratio compares two policies, not two masks.

With a float16 base, the loss is scaled (see `updates`). If a gradient still overflows, the step is
computed again with a lower scale for that agent.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evo_grpo.errors import ConfigError
from evo_grpo.learn.metrics import MetricSums, finish, measure, start_metrics
from evo_grpo.learn.objective.losses import (
    LossValues,
    TokenTerms,
    largest_penalty,
    token_terms_of,
    token_weights_of,
)
from evo_grpo.learn.objective.ratios import kl_term
from evo_grpo.learn.objective.shaping import token_advantages
from evo_grpo.learn.packing import MicroBatch, collate, pack
from evo_grpo.learn.rows import (
    AgentBatch,
    AgentTraining,
    Row,
    StepTotals,
    assign_minibatches,
    filter_and_whiten,
)
from evo_grpo.learn.updates import LossScales, OwnOptimizers, Updates, first_scale
from evo_grpo.model.alone import excluding_loads
from evo_grpo.model.forward.choice import TrainForward, give_up_kernels, open_forward
from evo_grpo.model.forward.stacks import RowLayout
from evo_grpo.model.llama.cuda.operators import KernelError
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.model.out_of_memory import free_cached, halved, is_out_of_memory
from evo_grpo.schema.hparams import Hparams
from evo_grpo.seeding import derive
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS, AlgorithmConfig, LossConfig
from evo_grpo.settings.engine import EngineConfig


@dataclass(frozen=True)
class _Call:
    """The state of one learn call.

    `totals` has the numbers by which each agent's losses are averaged, and `seed` seeds dropout.
    `sums` has sums of metrics on the device, `metrics` the metrics of each agent on the host.
    """

    agents: Sequence[AgentTraining]
    totals: Sequence[StepTotals]
    seed: int
    exact_sampler: bool
    losses: Sequence[LossConfig]
    sums: MetricSums
    metrics: list[dict[str, float]]

    def denominators(self, minibatch: int) -> Tensor:
        """Return each agent's numbers of rows and tokens (N, 2) in a minibatch; 1 for none."""
        counts = [
            (t.rows[minibatch], t.tokens[minibatch]) if minibatch < t.minibatches else (1, 1)
            for t in self.totals
        ]
        return torch.tensor(counts, dtype=torch.float32, device=self.sums.device)


class Learner:
    """Trains any set of agents at once over one base.

    All agents share the settings in `algorithm` that shape advantages. `updates` takes the
    optimizer steps, with each agent's own optimizer or by an engine of DeepSpeed.
    """

    def __init__(
        self, slots: AdapterSlots, algorithm: AlgorithmConfig, engine: EngineConfig
    ) -> None:
        self.slots = slots
        self.base = slots.base
        self.algorithm = algorithm
        self.engine = engine
        self.loss = algorithm.loss(algorithm.max_output_tokens or DEFAULT_OUTPUT_TOKENS)
        self.updates: Updates = OwnOptimizers(slots)
        #: Tokens of a micro-batch after the device ran out of memory; None before.
        self.reduced: int | None = None

    @excluding_loads()
    def learn(
        self,
        agents: Sequence[AgentTraining],
        batches: Sequence[AgentBatch],
        *,
        seed: int,
        exact_sampler: bool = True,
    ) -> list[dict[str, float]]:
        """Take every agent's optimizer steps on its rows; an agent may have no rows.

        Args:
            agents: N agents.
            batches: The rows of each agent, in the order of `agents`.
            seed: Seed of minibatch order and dropout.
            exact_sampler: Whether the rows' sampler log-probs equal this learner's up to rounding
                (see `RolloutEngine.exact`). If False, the loss uses them for `sampler_correction`
                and `off_policy_mask_threshold`; a row without them counts as sampled by the policy.

        Returns:
            Per agent the metrics that docs/metrics.md describes. kl is absent if none was computed,
            sampler_gap if no row has sampler log-probs; failed is 1 if a gradient was not finite
            and its step was not taken.
        """
        longest = max((len(r.token_ids) for b in batches for r in b.rows), default=0)
        self.base.row_limit.check(longest)
        row_counts = [len(b.rows) for b in batches]
        batches = [replace(b, rows=filter_and_whiten(b.rows, self.algorithm)) for b in batches]
        for agent, batch in zip(agents, batches, strict=True):
            order = derive(seed, "order", batch.agent)
            assign_minibatches(batch.rows, agent.hparams, order, batch.minibatches)
        live = [
            [(i, row) for row in batch.rows if _has_gradient(row, agent.hparams)]
            for i, (agent, batch) in enumerate(zip(agents, batches, strict=True))
        ]
        call = _Call(
            agents=agents,
            totals=[StepTotals.of(batch.rows) for batch in batches],
            seed=seed,
            exact_sampler=exact_sampler,
            losses=[self.loss.of_agent(agent.hparams) for agent in agents],
            sums=MetricSums(len(agents), self.base.device),
            metrics=[start_metrics(n, len(rows)) for n, rows in zip(row_counts, live, strict=True)],
        )
        all_pairs = [pair for pairs in live for pair in pairs]
        later = [p for p in all_pairs if p[1].minibatch > 0]
        if self.updates.parts == 1:
            self._fill_old_logprobs(call, later)
        else:  # each process takes the rows that it has in the step
            for minibatch in sorted({row.minibatch for _, row in later}):
                self._fill_old_logprobs(call, [p for p in later if p[1].minibatch == minibatch])
        for epoch in range(max((a.hparams.update_epochs for a in agents), default=0)):
            for minibatch in range(max((t.minibatches for t in call.totals), default=0)):
                pairs = [
                    p
                    for p in all_pairs
                    if p[1].minibatch == minibatch and epoch < agents[p[0]].hparams.update_epochs
                ]
                if pairs:
                    self._step(call, pairs, epoch, minibatch)
        self.updates.total(call.sums)
        return finish(call.sums, call.metrics)

    def limit_output(self, longest: int) -> None:
        """Set the maximum length of a completion, in tokens, by which dr_grpo divides.

        ConfigError is raised if `overlong_buffer` is greater.
        """
        buffer = self.algorithm.overlong_buffer
        if buffer is not None and buffer > longest:
            raise ConfigError(
                f"overlong_buffer: expected at most the {longest} tokens of the longest "
                f"completion, got {buffer}; lower it, or raise max_output_tokens"
            )
        self.loss = self.algorithm.loss(longest)

    def _step(self, call: _Call, pairs: list[tuple[int, Row]], epoch: int, minibatch: int) -> None:
        """Sum gradients over the micro-batches of `pairs`, then step each agent's optimizer."""
        agents = call.agents
        # No agent has been updated yet: the present policy is the old one.
        is_first = epoch == minibatch == 0
        present = sorted({position for position, _ in pairs})
        forward = self._open_forward([agents[position].adapter for position in present])
        has_kl = any(agents[position].hparams.beta > 0 for position in present)
        references = [agents[position].reference for position in present]
        reference = self._open_forward(references) if has_kl else None
        sums_before = call.sums.copy()
        scales = self._loss_scales(call, pairs, minibatch)

        def start_anew() -> None:
            forward.collect_gradients()
            for position in present:
                agents[position].optimizer.zero_grad(set_to_none=True)
            call.sums.put_back(sums_before)

        while True:
            self._retry_smaller(
                pairs,
                lambda: self._accumulate(
                    call, pairs, forward, reference, minibatch, first=is_first, scales=scales
                ),
                start_anew,
            )
            forward.collect_gradients()
            if scales is None or not self._overflowed(call, present, scales):
                break
            start_anew()
        self.updates.step([(agents[position], call.metrics[position]) for position in present])

    def _loss_scales(
        self, call: _Call, pairs: list[tuple[int, Row]], minibatch: int
    ) -> LossScales | None:
        """Return the loss scales of the agents in `pairs`; None if the base is not in float16."""
        if self.base.dtype is not torch.float16:
            return None
        rows: dict[int, list[Row]] = {}
        for position, row in pairs:
            rows.setdefault(position, []).append(row)
        exponents: dict[int, int] = {}
        for position, rows_of_agent in rows.items():
            totals = call.totals[position]
            exponents[position] = first_scale(
                call.agents[position],
                rows_of_agent,
                (totals.rows[minibatch], totals.tokens[minibatch]),
                call.losses[position],
                self.algorithm.adv_clip_range,
            )
        return LossScales(exponents)

    def _overflowed(self, call: _Call, present: Sequence[int], scales: LossScales) -> bool:
        """Divide gradients by their agents' scales; lower an agent's scale if they overflowed.

        Returns whether a scale was lowered, because the step must then be repeated.
        """
        losses = call.sums.values["loss"].tolist()
        must_repeat = False
        for position in present:
            adapter = call.agents[position].adapter
            grads = [p.grad for p in self.slots.parameters(adapter) if p.grad is not None]
            scales.divide_out(position, grads)
            # If the loss is not finite, a lower scale does not help.
            if math.isfinite(losses[position]) and not _finite(grads):
                must_repeat = scales.lower(position) or must_repeat
        return must_repeat

    def _accumulate(
        self,
        call: _Call,
        pairs: list[tuple[int, Row]],
        forward: TrainForward,
        reference: TrainForward | None,
        minibatch: int,
        *,
        first: bool,
        scales: LossScales | None,
    ) -> None:
        """Compute gradients and metrics of the rows in `pairs`, summed over micro-batches."""
        agents = call.agents
        denominators = call.denominators(minibatch)
        buckets = self._packed(pairs)
        for number, bucket in enumerate(buckets, 1):
            share, is_counted = self.updates.share(bucket, last=number == len(buckets))
            batch = collate(share, self.base.pad_id, self.base.device)
            dropout = self._dropout(call, batch)
            layout = RowLayout(tuple(agents[p].adapter for p in batch.present), batch.counts)
            self._fill_reference_logprobs(agents, batch, reference)
            # The context spans the backward: gradient checkpointing runs the forward again there.
            with forward.rows(layout, dropout):
                flat, entropy = self._logprobs(agents, batch, forward)
                if first:
                    batch.scatter("old", flat)
                entropies = batch.pad(entropy)
                terms = self._loss_terms(call, batch, flat, entropies)
                weights = token_weights_of(
                    self._losses(call, batch),
                    batch.mask,
                    num_rows=denominators[batch.positions, :1],
                    num_tokens=denominators[batch.positions, 1:],
                )
                scaled = weights if scales is None else weights * scales.of(batch.positions)
                loss = torch.where(batch.mask, scaled * terms.loss, 0.0).sum()
                self.updates.backward(loss if is_counted else 0.0 * loss)
            if is_counted:
                measure(call.sums, batch, terms, weights, entropies, flat, first=first)

    def _retry_smaller(
        self,
        pairs: Sequence[tuple[int, Row]],
        attempt: Callable[[], None],
        start_anew: Callable[[], None],
    ) -> None:
        """Call `attempt`, with smaller micro-batches each time the device runs out of memory.

        If a kernel fails to compile or launch, `attempt` is called again without kernels.
        `start_anew` removes partial results. If memory runs out for a single row, or while several
        processes compute a step together, RunFailedError is raised.
        """
        while True:
            try:
                return attempt()
            except KernelError as error:
                give_up_kernels(self.base, error)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                lengths = [len(row.token_ids) for _, row in pairs]
                # A row above the budget is a micro-batch already, which cannot be smaller.
                is_alone = min(self._tokens, sum(lengths)) <= max(lengths)
                self.reduced = halved(
                    "engine.max_tokens_per_microbatch",
                    self._tokens,
                    0 if is_alone else sum(lengths),
                    error,
                    "set engine.gradient_checkpointing: true, shorten algorithm.max_output_tokens, "
                    "or lower population.size",
                    repeats=self.engine.each_alone,
                )
            start_anew()
            free_cached()

    def _packed(self, pairs: list[tuple[int, Row]]) -> list[list[tuple[int, Row]]]:
        """Split rows into micro-batches within the sum of the limits of all processes."""
        rows, parts = self.engine.max_rows_per_microbatch, self.updates.parts
        return pack(pairs, self._tokens * parts, None if rows is None else rows * parts)

    @property
    def _tokens(self) -> int:
        # Not cached: an engine may move the base to its device later.
        budget = self.engine.max_tokens_per_microbatch or self.base.micro_batch_tokens
        return self.reduced or budget

    def _loss_terms(
        self, call: _Call, batch: MicroBatch, flat: Tensor, entropies: Tensor
    ) -> TokenTerms:
        """Return the loss terms (B, C) from log-probs `flat` (M,) and entropies (B, C), nats."""
        hparams = [agent.hparams for agent in call.agents]
        values = LossValues.of_agents(hparams, batch.positions, flat.dtype)
        logprobs, old, reference, kl = batch.pad(flat), batch.gather("old"), None, None
        if any(row.ref is not None for row in batch.rows):
            reference = batch.gather("ref")
        advantages = self._advantages(batch, values.beta, logprobs.detach(), reference)
        if self.algorithm.kl_shaping:
            # The metric stays the k3 estimate of the penalty; the advantages use the signed k1.
            kl = kl_term(logprobs.detach(), reference, batch.mask, values.beta)
            # The KL is in the advantages; a penalty would count it twice.
            values = replace(values, beta=0.0)
        inputs = {
            "old_logprobs": old,
            "mask": batch.mask,
            "advantages": advantages,
            "ref_logprobs": reference,
            "entropies": entropies,
            "sampler_logprobs": None if call.exact_sampler else batch.sampler_logprobs(old),
        }
        terms = token_terms_of(self._losses(call, batch), logprobs, inputs, values)
        return terms if kl is None else replace(terms, kl=kl)

    @staticmethod
    def _losses(call: _Call, batch: MicroBatch) -> list[LossConfig]:
        return [call.losses[position] for position in batch.owners]

    def _advantages(
        self,
        batch: MicroBatch,
        beta: float | Tensor,
        logprobs: Tensor,
        reference: Tensor | None,
    ) -> Tensor:
        """Return advantages (B,), or (B, C) if they differ between tokens.

        `beta` is the weight of KL shaping, a float or (B, 1). In all epochs, KL shaping compares
        the current policy with the reference; the ratio in the loss corrects for samples of the old
        policy.
        """
        advantages = batch.advantages.to(logprobs.dtype)
        clip_range, shapes = self.algorithm.adv_clip_range, self.algorithm.kl_shaping
        if not shapes and clip_range is None:
            return advantages
        kl = None if reference is None or not shapes else logprobs - reference
        shaped, _ = token_advantages(
            advantages, batch.mask, kl=kl, beta=beta, clip_range=clip_range
        )
        return shaped

    def _open_forward(self, adapters: Sequence[str | None]) -> TrainForward:
        recompute = self.engine.gradient_checkpointing
        return open_forward(self.slots, adapters, recompute=recompute, plain=self.updates.plain)

    def _logprobs(
        self, agents: Sequence[AgentTraining], batch: MicroBatch, forward: TrainForward
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs (M,) and entropies (M,), nats, of the generated tokens."""
        hidden = forward.hidden_at(batch.input_ids, batch.where, batch.prefix)
        per_row = torch.tensor([agents[p].hparams.temperature for p in batch.owners])
        lengths = torch.tensor([row.generated for row in batch.rows])
        temperature = per_row.repeat_interleave(lengths).to(hidden.device)
        has_bonus = any(agents[p].hparams.entropy_coef > 0 for p in batch.present)
        return self.base.token_logprobs(hidden, batch.targets, temperature, of_entropies=has_bonus)

    @torch.no_grad()
    def _fill_old_logprobs(self, call: _Call, pairs: list[tuple[int, Row]]) -> None:
        """Compute the old log-probs of rows of later minibatches, before the first update."""
        agents = call.agents
        if not pairs:
            return
        present = sorted({position for position, _ in pairs})
        forward = self._open_forward([agents[position].adapter for position in present])

        def fill() -> None:
            for bucket in self._packed(pairs):
                share, _ = self.updates.share(bucket, last=False)
                batch = collate(share, self.base.pad_id, self.base.device)
                dropout = self._dropout(call, batch)
                layout = RowLayout(tuple(agents[p].adapter for p in batch.present), batch.counts)
                with forward.rows(layout, dropout):
                    flat, _ = self._logprobs(agents, batch, forward)
                batch.scatter("old", flat)

        self._retry_smaller(pairs, fill, lambda: None)

    @torch.no_grad()
    def _fill_reference_logprobs(
        self, agents: Sequence[AgentTraining], batch: MicroBatch, forward: TrainForward | None
    ) -> None:
        """Compute missing reference log-probs of the rows whose agent has a KL term."""
        pairs = [
            (p, row)
            for p, row in zip(batch.owners, batch.rows, strict=True)
            if agents[p].hparams.beta > 0 and row.ref is None
        ]
        if forward is None or not pairs:
            return
        # One forward for all: rows of agents without a reference slot use the base alone, and
        # agents that share a reference slot use that slot.
        is_whole = len(pairs) == len(batch.rows)
        subset = batch if is_whole else collate(pairs, self.base.pad_id, self.base.device)
        layout = RowLayout(tuple(agents[p].reference for p in subset.present), subset.counts)
        with forward.rows(layout):
            flat, _ = self._logprobs(agents, subset, forward)
        subset.scatter("ref", flat)

    def _dropout(self, call: _Call, batch: MicroBatch) -> tuple[int, ...] | None:
        agents, seed = call.agents, derive(call.seed, "dropout")
        rates = [self.slots.lora_config(agents[p].adapter).lora_dropout for p in batch.present]
        if not any(rates):
            return None
        return tuple(
            derive(seed, agents[p].stream or agents[p].adapter, row.number)
            for p, row in zip(batch.owners, batch.rows, strict=True)
        )


def _has_gradient(row: Row, hparams: Hparams) -> bool:
    """Return whether a row can have a gradient; a row without one must not cause an AdamW step."""
    return (row.advantage != 0.0 or largest_penalty(hparams) > 0) and row.generated > 0


def _finite(gradients: Sequence[Tensor]) -> bool:
    """Return whether all gradients of an agent are finite, with one host sync."""
    return bool(torch.stack([g.isfinite().all() for g in gradients]).all()) if gradients else True
