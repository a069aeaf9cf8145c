"""Predicts the peak memory of a run from the shapes of its model and its settings.

    peak = process + base + agents + rollout engine + max(sampling, learning) + checkpoints

The memory of the agents is exact: 16 bytes per parameter of an adapter (weight, gradient and the
two moments of AdamW, in float32). A reference takes 4 bytes more, the archive 12, and the adapter
that all agents start from 4. With `engine.offload_adapters`, only the agents of the shard that
computes count, plus 12 bytes per parameter of the next shard's agents, and 4 for the stacked
weights of the present shard. The terms of sampling and learning sum the tensors that exist at the
same time. Predictions are within 7% of the measured peaks of memory in use
(experiments/bench/plan.py); on a CPU, glibc keeps up to 15% more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from evo_grpo.model.llama.families import FAMILIES
from evo_grpo.settings import EngineConfig, RunConfig
from evo_grpo.settings.algorithm import DEFAULT_PROMPTS
from evo_grpo.settings.engines.declaration import Device, EngineLoad, Part, Shape, Work
from evo_grpo.training.sizing.model_size import ModelSize, classifier_parameters, lora_parameters

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: PEFT keeps adapters in float32 for any dtype of the base: weight, gradient, two moments of Adam.
_TRAINED_BYTES = 4 * (1 + 1 + 2)
_STORED_BYTES = 4 * (1 + 2)
_REFERENCE_BYTES = 4

#: Assumed tokens of a prompt, unless `algorithm.max_model_len` is set.
PROMPT_TOKENS = 128
#: Python with torch, transformers and PEFT, before a model is loaded; on CUDA its context.
PROCESS_BYTES = {"cpu": 440 << 20, "cuda": 600 << 20}
#: Logits that `model.logprobs` computes at once, in elements.
LOGIT_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 25}
#: Padded tokens of a micro-batch, as `SharedBase.micro_batch_tokens` chooses them.
ACTIVATION_BYTES = 1 << 29
CPU_TOKENS = (2048, 8192)
DEVICE_TOKENS = 4096
#: Most gradients of an adapter in splits, beyond one for each agent; see `llama.cuda.learn`.
KERNEL_SPLITS = 40
#: As in `model.forward.prefix` and `model.llama.attention`.
MIN_SAVED_SHARE = 0.05
SHORT = 128


@dataclass(frozen=True)
class MemoryPlan:
    """The predicted memory of one process on one device.

    Attributes:
        dtype: Dtype of the base.
        held: Memory that is in use throughout the run.
        sampling: Additional memory while the engine samples.
        learning: Additional memory while agents learn; sampling and learning alternate.
        shortages: A sentence for each limit of the rollout engine that is too low.
        decode_rows: Number of completions that are decoded at once.
        micro_batch_tokens: Most padded tokens of a micro-batch.
        row: Tokens of the longest prompt and its completion.
        remedies: Changes to the rollout engine's settings that save memory, the best first.
    """

    dtype: str
    held: tuple[Part, ...]
    sampling: tuple[Part, ...]
    learning: tuple[Part, ...]
    shortages: tuple[str, ...] = ()
    decode_rows: int = 0
    micro_batch_tokens: int = 0
    row: int = 0
    remedies: tuple[Mapping[str, object], ...] = ()

    def fits(self, capacity: float) -> bool:
        """Return whether the peak is at most `capacity` bytes and there are no `shortages`."""
        return self.peak <= capacity and not self.shortages

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


def work_of(
    config: RunConfig, size: ModelSize, output: int, device: Device, processes: int = 1
) -> Work | None:
    """Return the most work that a process computes at once; None if the layers are unknown.

    `output` is the number of tokens of the longest completion.
    """
    lora = config.largest_lora
    parameters = lora_parameters(size, lora)
    if parameters is None:
        return None
    algorithm, fitness, engine = config.algorithm, config.evolve.fitness, config.engine
    # The first round has the most agents. With ZeRO every process has all agents.
    agents, dealt = config.population.size, 1 if engine.zero is not None else processes
    per_process = -(-agents // dealt)
    # The agents of a shard generate and learn in one batch.
    together = -(-agents // engine.parts(dealt))
    rows = together * (algorithm.prompts_per_step or DEFAULT_PROMPTS) * algorithm.group_size
    context = algorithm.max_model_len or min(size.context or 1 << 30, PROMPT_TOKENS + output)
    divided = engine.base == "sharded" or engine.zero == 3
    offloads = engine.offload_adapters and device == "cuda"
    specialised = engine.each_alone and engine.quantization is None and not lora.dropout
    family = FAMILIES[size.architecture]
    return Work(
        agents=per_process,
        archive=config.evolve.keeps_archive,
        references=algorithm.separate_reference,
        start=config.model.adapter is not None and not algorithm.separate_reference,
        parameters=parameters,
        rank=max([lora.r, *lora.rank_pattern.values()]),
        rows=rows if engine.zero is None else -(-rows // processes),
        evaluation_rows=together * fitness.prompts * fitness.per_prompt(fitness.samples),
        prompt_tokens=max(1, context - output),
        output_tokens=output,
        filtered=algorithm.top_p < 1 or algorithm.top_k > 0,
        specialised=specialised,
        shards=processes if divided else 1,
        group=algorithm.group_size,
        least_rows=together * algorithm.group_size,
        head_norms=bool(family.head_norms),
        kernels=specialised and family.kernels and engine.kernels != "off",
        # The part that computes, and the next one.
        resident=min(per_process, 2 * together) if offloads else None,
    )


def reward_models(config: RunConfig, device: Device) -> list[Part]:
    """Return the memory of each reward model's weights; 0 bytes if its size is unknown.

    Raises ModelError if a reward model does not exist or its files are damaged.
    """
    auto = "bfloat16" if device == "cuda" else "float32"
    return [
        Part(
            f"reward model {reward.name}",
            (classifier_parameters(reward.name) or 0)
            * DTYPE_BYTES[auto if reward.dtype == "auto" else reward.dtype],
            "dtype of env.reward",
        )
        for reward in config.env.reward_models
    ]


def trained_bytes(parameters: int, *, reference: bool) -> int:
    """Return the bytes of an agent in training: adapter, gradient, Adam state, any reference."""
    return parameters * (_TRAINED_BYTES + (_REFERENCE_BYTES if reference else 0))


def stored_bytes(parameters: int, *, reference: bool) -> int:
    """Return the bytes of an agent when saved or sent: adapter, Adam state, any reference."""
    return parameters * (_STORED_BYTES + (_REFERENCE_BYTES if reference else 0))


def total(parts: tuple[Part, ...]) -> int:
    """Return the summed bytes of parts of the memory."""
    return sum(part.bytes for part in parts)


def base_bytes(size: ModelSize, dtype: str, quantization: str | None = None) -> int | None:
    """Return the bytes of a base's weights; None if its layers are unknown.

    `dtype` is the dtype of weights that are not quantised.
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
    quantized = inside + 4 * outputs if quantization == "int8" else inside // 2 + inside * 4 // 64
    return quantized + (size.parameters - inside) * each


def predict(
    size: ModelSize,
    work: Work,
    engine: EngineConfig,
    *,
    dtype: str,
    device: Device,
    capacity: int | None = None,
    others: Sequence[Part] = (),
) -> MemoryPlan | None:
    """Predict the memory of a run; None if the model's layers are unknown.

    `capacity` is the memory of the device in bytes. `others` is memory that is also in use
    throughout the run, for instance by reward models.
    """
    base = base_bytes(size, dtype, engine.quantization)
    weights = base_bytes(size, dtype)
    if base is None or weights is None or size.shape is None:
        return None
    each = DTYPE_BYTES[dtype]
    # float16 is the dtype of cards that are too old for kernels.
    work = replace(work, kernels=work.kernels and device == "cuda" and dtype == "bfloat16")
    held = [*_held(size, work, engine, base, each, device), *others]
    rollout = engine.rollout_settings
    most = max(work.rows, work.evaluation_rows)
    decoded = max(min(engine.decode_rows, most), min(work.least_rows, most))
    load = EngineLoad(
        shape=size.shape,
        work=work,
        rows=decoded,
        element=each,
        weights=weights,
        base=base,
        device=device,
        capacity=capacity,
        number=int(engine.device.partition(":")[2] or 0),
        graphs=engine.cuda_graphs and device == "cuda" and work.specialised,
    )
    held += rollout.held_memory(load)
    if device == "cpu":
        # Agents are copied before the next round, and the copies are written while it trains.
        snapshots = work.agents * stored_bytes(work.parameters, reference=work.references)
        held.append(Part("checkpoints being written", snapshots, "population.size, model.lora.r"))
    budget = engine.max_tokens_per_microbatch or micro_batch_tokens(size.shape, each, device)
    return MemoryPlan(
        dtype,
        tuple(held),
        rollout.sampling_memory(load),
        _learning(size.shape, work, engine, budget, each, device),
        shortages=tuple(rollout.shortages(load)),
        decode_rows=decoded,
        micro_batch_tokens=budget,
        row=work.prompt_tokens + work.output_tokens,
        remedies=tuple(rollout.remedies(load)),
    )


def _held(
    size: ModelSize, work: Work, engine: EngineConfig, base: int, each: int, device: Device
) -> list[Part]:
    """Return the memory that the process, the base and the agents take throughout a run."""
    linears = sum(inputs * outputs for inputs, outputs in size.linears.values())
    largest = max(inputs * outputs for inputs, outputs in size.linears.values())
    sharded = (linears * each) // work.shards + (base - linears * each) if work.shards > 1 else base
    stored = stored_bytes(work.parameters, reference=work.references)
    lowers = "population.size, model.lora.r"
    if device == "cuda" and engine.zero is None and work.resident is None:
        lowers += ", or set engine.offload_adapters with three engine.shards or more"
    return [
        Part("Python and libraries", PROCESS_BYTES[device], ""),
        Part(
            "base",
            sharded + (largest * each if engine.quantization or work.shards > 1 else 0),
            "engine.dtype, engine.quantization",
        ),
        Part(
            "agents",
            _resident(work) * trained_bytes(work.parameters, reference=work.references)
            + (stored if work.archive and work.resident is None else 0)
            + (work.parameters * _REFERENCE_BYTES if work.start else 0),
            lowers,
        ),
    ]


def _resident(work: Work) -> int:
    return work.agents if work.resident is None else work.resident


@dataclass(frozen=True)
class LearnBatch:
    """The sizes of the largest micro-batch.

    Attributes:
        rows: Number of rows.
        prefixes: Number of prompts, each computed once for several rows; 0 if once for each row.
        prompt: Number of tokens of a prompt.
        rest: Number of tokens that are computed for each row.
    """

    rows: int
    prefixes: int
    prompt: int
    rest: int

    @property
    def tokens(self) -> int:
        """Number of tokens that a layer computes."""
        return self.prefixes * self.prompt + self.rows * self.rest

    @property
    def seen(self) -> int:
        """Number of keys that a layer computes, or copies for a row."""
        per_row = self.rest + (self.prompt if self.prefixes else 0)
        return self.prefixes * self.prompt + self.rows * per_row


def learn_batch(work: Work, budget: int, most_rows: int | None) -> LearnBatch:
    """Return the largest micro-batch of at most `budget` padded tokens and `most_rows` rows."""
    prompt, output = work.prompt_tokens, work.output_tokens
    rows = max(1, min(work.rows, most_rows or work.rows, budget // max(1, output)))
    while rows > 1 and _padded(rows, work) > budget:
        rows -= max(1, int(rows * (1 - budget / _padded(rows, work))))
    prefixes, rest = -(-rows // min(work.group, rows)), output - 1
    shares = prefixes * prompt + rows * rest <= (1 - MIN_SAVED_SHARE) * rows * (prompt + rest)
    if work.specialised and shares:
        return LearnBatch(rows, prefixes, prompt, rest)
    return LearnBatch(rows, 0, prompt, prompt + output)


def _padded(rows: int, work: Work) -> int:
    prompts = -(-rows // work.group)
    return min(rows, prompts) * work.prompt_tokens + rows * work.output_tokens


def saved_bytes(shape: Shape, work: Work, batch: LearnBatch, each: int, device: Device) -> int:
    """Return the bytes that a layer keeps for its backward pass, at `each` bytes per number."""
    hidden, queries, kv, inner = shape.hidden, shape.query_width, shape.kv_width, shape.inner
    tokens = batch.tokens
    if work.kernels:
        # Inputs and outputs of both norms, q, k, v, outputs of heads, gate and up, products with A,
        # and log-sum-exps, of rests twice.
        numbers = 4 * hidden + 2 * (queries + kv + inner) + 7 * work.rank
        numbers += (queries + 2 * kv) * work.head_norms
        rests = batch.rows * batch.rest if batch.prefixes else 0
        return each * tokens * numbers + 4 * shape.heads * (tokens + rests)
    # The inputs of both norms and of the linear layers, the gate, both parts of its product, and
    # the products with A of seven adapters.
    numbers = tokens * (4 * hidden + 2 * queries + 4 * inner + 7 * work.rank)
    wide = 2 * tokens  # float32 scales of both norms
    if not work.specialised:
        numbers += tokens * 2 * kv
        wide += 2 * tokens * shape.heads if work.head_norms else 0
        if each < 4:  # norms keep a copy of their input in float32
            numbers += tokens * 2 * hidden
        if work.head_norms:
            numbers += tokens * (queries + kv) * (1 if each == 4 else 2)
        return each * numbers + 4 * (wide + tokens * shape.heads)
    if work.head_norms:
        numbers += tokens * (queries + 2 * kv)
        wide += 2 * tokens * shape.heads
    numbers += 2 * kv * batch.seen
    rests = batch.rest + (batch.prompt if batch.prefixes else 0)
    if device == "cpu" and batch.rest * rests <= SHORT * SHORT and batch.prompt <= SHORT:
        # The attention of short rows keeps its weights.
        prompts = batch.prefixes * batch.prompt * batch.prompt
        numbers += shape.heads * (prompts + batch.rows * batch.rest * rests)
    else:
        wide += tokens * shape.heads
        if batch.prefixes:
            numbers += tokens * queries  # the outputs of prompts and rests are joined
            if device == "cuda":  # keys and values are repeated for the heads
                numbers += 2 * (queries - kv) * batch.rows * rests
    return each * numbers + 4 * wide


def _learning(
    shape: Shape, work: Work, engine: EngineConfig, budget: int, each: int, device: Device
) -> tuple[Part, ...]:
    batch = learn_batch(work, budget, engine.max_rows_per_microbatch)
    hidden, inner, tokens = shape.hidden, shape.inner, batch.tokens
    layer = saved_bytes(shape, work, batch, each, device)
    # Gradients of a layer that exist at once.
    passing = tokens * each * (3 * hidden + (2 if work.specialised else 3) * inner)
    if work.kernels:
        # Splits of the gradients of a layer's adapters, with the zeros of joined B.
        passing += 6 * (_resident(work) + KERNEL_SPLITS) * work.parameters // shape.layers
    if engine.gradient_checkpointing:
        inputs = 2 if work.kernels else 1  # kernels keep the norm of each too
        activations = inputs * shape.layers * tokens * hidden * each + layer + passing
    else:
        activations = shape.layers * layer + passing
    # The last hidden states: all, those of the generated tokens, and their normalised ones.
    activations += 3 * tokens * hidden * each
    lowers = "engine.max_tokens_per_microbatch, engine.gradient_checkpointing"
    parts = [
        # The adapters' gradients are counted with the agents. They do not exist yet where the
        # activations are largest; there, the joined layers keep stacked adapters of that size.
        Part("activations of a micro-batch", activations, lowers),
        Part(
            "logits of a block", 3 * 4 * min(LOGIT_ELEMENTS[device], tokens * shape.vocabulary), ""
        ),
    ]
    if work.kernels:
        # A and B in the base's dtype, and gradients in fp32, with the zeros of joined B.
        stacks = 5 * _resident(work) * work.parameters
        parts.append(Part("adapters side by side", stacks, "population.size"))
    if not work.specialised:
        # A step stacks the adapters of a layer and keeps the stacks for the backward pass.
        stacks = _resident(work) * work.parameters * each
        if engine.gradient_checkpointing:
            stacks //= shape.layers
        parts.append(Part("adapters side by side", stacks, "population.size"))
    return tuple(parts)


def micro_batch_tokens(shape: Shape, each: int, device: Device) -> int:
    """Return the default of `engine.max_tokens_per_microbatch`."""
    if device != "cpu":
        return DEVICE_TOKENS
    hidden, inner = shape.hidden, shape.inner
    per_layer = (hidden + shape.query_width) * 2 + 2 * (hidden + shape.kv_width)
    per_layer += 3 * (hidden + inner)
    least, most = CPU_TOKENS
    return min(most, max(least, ACTIVATION_BYTES // max(1, shape.layers * per_layer * each)))
