"""Takes optimizer steps with each agent's AdamW; computes lr factors and scales of float16 losses.

The gradient of a mean over n tokens has a magnitude of 1 / n, and float16 has no number between 0
and 6e-8. So each agent's loss is multiplied by a power of two before the backward, and the float32
gradients of its adapter are divided by it afterwards (Micikevicius et al. 2018, arXiv:1710.03740).

A scale depends only on the rows of its step, not on earlier steps or other agents, so a resumed run
takes the same steps as an uninterrupted one.
"""

import logging
import math
from collections.abc import Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from evo_grpo.learn.metrics import MetricSums
from evo_grpo.learn.objective.losses import largest_penalty, token_weights
from evo_grpo.learn.rows import AgentTraining, Row
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.settings.algorithm import LossConfig, LRSchedule

#: (position of its agent, row) pairs of a micro-batch.
Bucket = list[tuple[int, Row]]


class Updates(Protocol):
    """Takes the optimizer steps of a learner.

    The rows of a micro-batch are divided among `parts` processes. If `plain` is True, forward
    passes run the model's own modules, not a specialized forward.
    """

    parts: int
    plain: bool

    def share(self, bucket: Bucket, *, last: bool) -> tuple[Bucket, bool]:
        """Return this process's rows of a micro-batch, and whether they count in loss and metrics.

        At least one row is returned: if this process has none, a row of another process, which does
        not count. `last` marks the last micro-batch of a step.
        """
        ...

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of `loss`, which is the loss of this process's rows."""
        ...

    def step(self, agents: Sequence[tuple[AgentTraining, dict[str, float]]]) -> None:
        """Clip gradients and step each agent separately; skip agents whose gradient is not finite.

        All `agents` have a gradient. Their metrics grad_norm, updates and failed are updated.
        """
        ...

    def total(self, sums: MetricSums) -> None:
        """Replace `sums`, in place, by the totals of all processes."""
        ...


@final
class OwnOptimizers:
    """Steps the AdamW of each agent, in one process; see `Updates`."""

    parts = 1
    plain = False

    def __init__(self, slots: AdapterSlots) -> None:
        self.slots = slots

    def share(self, bucket: Bucket, *, last: bool) -> tuple[Bucket, bool]:
        """Return all rows of the micro-batch; all of them count."""
        del last
        return bucket, True

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of `loss`, the loss of all rows of a micro-batch."""
        self.slots.base.backward(loss)

    def step(self, agents: Sequence[tuple[AgentTraining, dict[str, float]]]) -> None:
        """Clip the gradients of each agent and step its AdamW; see `Updates.step`."""
        grads = [
            [p.grad for p in self.slots.parameters(agent.adapter) if p.grad is not None]
            for agent, _ in agents
        ]
        for (agent, entry), agent_grads, norm in zip(agents, grads, _norms(grads), strict=True):
            max_norm = agent.hparams.max_grad_norm
            entry["grad_norm"] += norm
            if math.isfinite(norm):
                if max_norm is not None and norm > max_norm:
                    torch._foreach_mul_(agent_grads, max_norm / (norm + 1e-6))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage] -- one launch; `clip_grads_with_norm_` rounds the factor to float32 and multiplies unclipped gradients too
                agent.optimizer.step()
                self.slots.mark_changed(agent.adapter)
                entry["updates"] += 1
            else:
                entry["failed"] = 1.0
            agent.optimizer.zero_grad(set_to_none=True)

    def total(self, sums: MetricSums) -> None:
        """Do nothing: there is one process."""
        del sums


def _norms(grads: Sequence[list[Tensor]]) -> list[float]:
    """Return the norm of each agent's gradients, with one host sync for all."""
    flat = torch._foreach_norm([g for agent_grads in grads for g in agent_grads])  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage] -- one call for all agents; `get_total_norm` gives the same bits, agent by agent, in 1.6 times the time
    parts = torch.stack(flat).split([len(agent_grads) for agent_grads in grads])
    return torch.stack([torch.linalg.vector_norm(part) for part in parts]).tolist()


def lr_factor(schedule: LRSchedule, step: int) -> float:
    """Return the factor, in (0, 1], that multiplies an agent's lr in GRPO step `step` (0-based).

    In the warm-up the factor rises linearly. After the warm-up, the factor is the cosine of
    Loshchilov and Hutter 2016, arXiv:1608.03983. After the end of the schedule, it keeps its last
    value.
    """
    warm = math.ceil(schedule.warmup_proportion * schedule.steps)
    if step < warm:
        return (step + 1) / warm
    decay_steps = max(1, schedule.steps - warm)
    # The last step still moves: the cosine reaches zero one step after the end.
    progress = min(step - warm, decay_steps - 1) / decay_steps
    return 0.5 * (1 + math.cos(math.pi * progress))


_log = logging.getLogger(__name__)

#: Gradient of a typical token's log-prob after scaling, as a power of two.
TYPICAL = 4
#: Power of two by which a scale is lowered after an overflow, and how often it may be lowered.
LOWERED_BY = 8
MOST_TIMES = 5
#: Largest power of two of a scale; float32, in which losses are scaled, holds larger ones.
MOST = 60


class LossScales:
    """The loss scales of one optimizer step, one power of two per agent."""

    def __init__(self, exponents: dict[int, int]) -> None:
        self._exponents = exponents
        self._lowered = dict.fromkeys(exponents, 0)

    def of(self, positions: Tensor) -> Tensor:
        """Return the scale (B, 1) fp32 of each row; `positions` (B,) has the rows' agents."""
        table = torch.ones(max(self._exponents) + 1)
        for position, exponent in self._exponents.items():
            table[position] = 2.0**exponent
        return table.to(positions.device)[positions][:, None]

    def divide_out(self, position: int, gradients: Sequence[Tensor]) -> None:
        """Divide an agent's gradients by the agent's scale, in place and without rounding."""
        if gradients:
            torch._foreach_mul_(list(gradients), 2.0 ** -self._exponents[position])  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage] -- one launch for all tensors; there is no public name

    def lower(self, position: int) -> bool:
        """Lower an agent's scale after an overflow; return False if `MOST_TIMES` forbids it."""
        if self._lowered[position] == MOST_TIMES:
            return False
        self._lowered[position] += 1
        self._exponents[position] -= LOWERED_BY
        _log.info(
            "float16: a gradient overflowed, and is computed again with its loss scaled by 2^%d",
            self._exponents[position],
        )
        return True


def first_scale(
    agent: AgentTraining,
    rows: Sequence[Row],
    totals: tuple[int, int],
    config: LossConfig,
    clip_range: float | None,
) -> int:
    """Return the exponent of the scale that gives a typical token a gradient of 2^`TYPICAL`.

    `rows` are the agent's rows of the step that have a gradient, at least one. `totals` are the
    numbers of rows and tokens of the step, including rows without a gradient. `clip_range` bounds
    the advantages, or is None. The exponent is 0 if an advantage is not finite.
    """
    lengths = torch.tensor([row.generated for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    weights = token_weights(
        config.loss_type,
        mask,
        num_rows=totals[0],
        num_tokens=totals[1],
        max_completion_length=config.max_completion_length,
        dtype=torch.float64,
    )
    bound = math.inf if clip_range is None else clip_range
    sizes = torch.tensor(
        [max(min(abs(row.advantage), bound), largest_penalty(agent.hparams)) for row in rows],
        dtype=torch.float64,
    )
    total = float((weights * sizes[:, None]).sum())
    typical = total / max(1, int(mask.sum())) / agent.hparams.temperature
    if not 0 < typical < math.inf:
        return 0
    return max(-MOST, min(MOST, TYPICAL - round(math.log2(typical))))
