"""Predicts the peak memory of a run from the shapes of its model and its settings.

    peak = process + base + agents + rollout engine + max(sampling, learning) + checkpoints

The memory of the agents is exact: 16 bytes per parameter of an adapter (weight, gradient and the
two moments of AdamW, in float32), 4 more for a reference, 12 for the archive, and 4 for an adapter
from which all agents start, which is then their reference. Sampling and learning count the tensors
that exist at once. experiments/bench/plan.py compares the prediction with measured peaks; they
agree within 20%.
"""

from __future__ import annotations

from dataclasses import dataclass

from evo_grpo.settings import EngineConfig
from evo_grpo.settings.engines.memory import Device, Part, Shape, Work
from evo_grpo.training.sizing.model_size import ModelSize

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: PEFT keeps adapters in float32 for any dtype of the base: weight, gradient, two moments of Adam.
_TRAINED_BYTES = 4 * (1 + 1 + 2)
_STORED_BYTES = 4 * (1 + 2)
_REFERENCE_BYTES = 4

#: Python with torch, transformers and PEFT, before a model is loaded; on CUDA its context.
PROCESS_BYTES = {"cpu": 420 << 20, "cuda": 600 << 20}
#: Logits that `model.logprobs` computes at once, in elements.
LOGIT_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}
#: Padded tokens of a micro-batch, as `SharedBase.micro_batch_tokens` chooses them.
ACTIVATION_BYTES = 1 << 29
CPU_TOKENS = (2048, 8192)
DEVICE_TOKENS = 4096


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one process on one device.

    Attributes:
        dtype: Dtype of the base.
        held: Memory that is in use throughout the run.
        sampling: Additional memory while the engine samples.
        learning: Additional memory while agents learn; sampling and learning alternate.
    """

    dtype: str
    held: tuple[Part, ...]
    sampling: tuple[Part, ...]
    learning: tuple[Part, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the memory at the peak."""
        return (*self.held, *max(self.sampling, self.learning, key=total))

    @property
    def peak(self) -> int:
        """Total bytes at the peak."""
        return total(self.parts)

    @property
    def largest(self) -> Part:
        """The largest part that a setting can make smaller."""
        return max((part for part in self.parts if part.settings), key=lambda part: part.bytes)


def trained_bytes(parameters: int, *, reference: bool) -> int:
    """Return the bytes of an agent in training: adapter, gradient, Adam state, reference."""
    return parameters * (_TRAINED_BYTES + (_REFERENCE_BYTES if reference else 0))


def stored_bytes(parameters: int, *, reference: bool) -> int:
    """Return the bytes of an agent in a checkpoint or message: adapter, Adam state, reference."""
    return parameters * (_STORED_BYTES + (_REFERENCE_BYTES if reference else 0))


def total(parts: tuple[Part, ...]) -> int:
    """Return the bytes of several parts."""
    return sum(part.bytes for part in parts)


def base_bytes(size: ModelSize, dtype: str, quantization: str | None = None) -> int | None:
    """Return the bytes of a base's weights; None if its layers are unknown.

    `dtype` is the dtype of the weights that are not quantised. int8 has one scale per output, nf4
    one per 64 weights.
    """
    if size.parameters is None:
        return None
    each = DTYPE_BYTES[dtype]
    if quantization is None:
        return size.parameters * each
    if not size.linears:
        return None
    inside = sum(inputs * outputs for inputs, outputs in size.linears.values())
    outputs = sum(outputs for _, outputs in size.linears.values())
    kept = inside + 4 * outputs if quantization == "int8" else inside // 2 + inside * 4 // 64
    return kept + (size.parameters - inside) * each


def predict(
    size: ModelSize, work: Work, engine: EngineConfig, *, dtype: str, device: Device
) -> MemoryPlan | None:
    """Return the memory of a run; None if the model's layers are unknown."""
    base = base_bytes(size, dtype, engine.quantization)
    if base is None or size.shape is None:
        return None
    each = DTYPE_BYTES[dtype]
    linears = sum(inputs * outputs for inputs, outputs in size.linears.values())
    largest = max(inputs * outputs for inputs, outputs in size.linears.values())
    sharded = (linears * each) // work.shards + (base - linears * each) if work.shards > 1 else base
    stored = stored_bytes(work.parameters, reference=work.references)
    held = [
        Part("Python and libraries", PROCESS_BYTES[device], ""),
        Part(
            "base",
            sharded + (largest * each if engine.quantization or work.shards > 1 else 0),
            "engine.dtype, engine.quantization",
        ),
        Part(
            "agents",
            work.agents * trained_bytes(work.parameters, reference=work.references)
            + (stored if work.archive else 0)
            + (work.parameters * _REFERENCE_BYTES if work.start else 0),
            "population.size, model.lora.r",
        ),
    ]
    rollout = engine.rollout_settings
    held += rollout.held_memory(base, device)
    if device == "cpu":
        # Agents are copied before the next round, and the copies are written while it trains.
        held.append(
            Part("checkpoints being written", work.agents * stored, "population.size, model.lora.r")
        )
    decoded = min(engine.max_decode_rows, max(work.rows, work.evaluation_rows))
    return MemoryPlan(
        dtype,
        tuple(held),
        rollout.sampling_memory(size.shape, work, rows=decoded, element=each),
        _learning(size.shape, work, engine, each, device),
    )


def _learning(
    shape: Shape, work: Work, engine: EngineConfig, each: int, device: Device
) -> tuple[Part, ...]:
    budget = engine.max_tokens_per_microbatch or micro_batch_tokens(shape, each, device)
    row = work.prompt_tokens + work.output_tokens
    most = work.rows if engine.max_rows_per_microbatch is None else engine.max_rows_per_microbatch
    tokens = max(row, min(budget, min(work.rows, most) * row))
    hidden, queries, kv, inner = shape.hidden, shape.query_width, shape.kv_width, shape.inner
    # Elements per token that a layer keeps for the backward pass.
    kept = 4 * hidden + 2 * queries + 2 * kv + 3 * inner
    if not work.specialised:
        # The modules also keep float32 copies in norms, rotated queries and keys, and both gates.
        kept += 4 * hidden + 2 * queries + 2 * kv + 2 * inner
    # Elements per token while a layer or its gradient is computed.
    passing = 3 * hidden + 4 * inner
    if engine.gradient_checkpointing:
        activations = shape.layers * hidden + kept + passing
    else:
        activations = shape.layers * kept + passing
    lowers = "engine.max_tokens_per_microbatch, engine.gradient_checkpointing"
    # The adapters' gradients are counted with the agents.
    return (
        Part("activations of a micro-batch", tokens * activations * each, lowers),
        Part("logits of a block", 3 * 4 * LOGIT_ELEMENTS[device], ""),
    )


def micro_batch_tokens(shape: Shape, each: int, device: Device) -> int:
    """Return the default of `engine.max_tokens_per_microbatch`."""
    if device != "cpu":
        return DEVICE_TOKENS
    hidden, inner = shape.hidden, shape.inner
    per_layer = (hidden + shape.query_width) * 2 + 2 * (hidden + shape.kv_width)
    per_layer += 3 * (hidden + inner)
    least, most = CPU_TOKENS
    return min(most, max(least, ACTIVATION_BYTES // max(1, shape.layers * per_layer * each)))
