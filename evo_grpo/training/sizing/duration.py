"""Predicts the time of a run on a GPU from its launches, bytes and FLOPs.

A kernel takes the time of a launch plus the longer of the times of its FLOPs and its bytes.
docs/performance.md, "On a GPU", has the sources of the constants.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from evo_grpo.settings import RunConfig
from evo_grpo.settings.engines.declaration import Shape
from evo_grpo.training.sizing.cards import Card
from evo_grpo.training.sizing.machine import Fit
from evo_grpo.training.sizing.memory import PROMPT_TOKENS, MemoryPlan, work_of

#: Seconds that a captured kernel takes beside its bytes and FLOPs: fits decode steps of the shape
#: of Qwen2.5-0.5B on an H200, 2026-11-28.
LAUNCH = 3.5e-6
#: Seconds to capture a graph, with the plain step before it; the larger of two, H200, 2026-11-26.
CAPTURE = 0.017
#: Time of torch's operations over that of kernels, in a decode step and in learning: the means of
#: six and two ratios on the H200, 2026-11-28; those of learning are counted on the kernels' side.
STEP_BY_TORCH, LEARN_BY_TORCH = 2.5, 3.0
#: Time of vLLM's decode step over that of kernels, counted by the launches of its LoRA layers.
STEP_BY_VLLM = 1.8
#: Launches of a layer in learning, forward and backward, by kernels and by torch's operations, and
#: the seconds that the host needs for each: with small micro-batches, a device waits for them.
LAUNCHES, LAUNCHES_BY_TORCH, HOST_LAUNCH = 53, 150, 2e-5
#: Bytes of a number in half precision.
HALF = 2


@dataclass(frozen=True)
class Counted:
    """Predicts the seconds of sampling and learning on a GPU, in half precision.

    Attributes:
        shape: Sizes of the base.
        card: The rates of the GPU.
        agents: Number of agents whose adapters are on the GPU.
        rank: Largest LoRA rank of these agents, which each linear layer is assumed to have.
    """

    shape: Shape
    card: Card
    agents: int
    rank: int

    @property
    def linears(self) -> tuple[tuple[int, int, int], ...]:
        """(inputs, outputs, summed ranks) of a layer's four products: qkv, o, gate and up, down."""
        s, r = self.shape, self.rank
        return (
            (s.hidden, s.query_width + 2 * s.kv_width, 3 * r),
            (s.query_width, s.hidden, r),
            (s.hidden, 2 * s.inner, 2 * r),
            (s.inner, s.hidden, r),
        )

    def _kernel(self, flops: float, numbers: float, rate: float, launches: int = 1) -> float:
        transfer = HALF * numbers / (rate * 1e12)
        return launches * LAUNCH + max(flops / (self.card.tflops * 1e12), transfer)

    def step(self, rows: int, columns: int) -> float:
        """Return the seconds of a decode step of `rows` rows with `columns` cached tokens each."""
        s, rate = self.shape, self.card.read

        def product(inputs: int, outputs: int, ranks: int) -> float:
            width = outputs + ranks * self.agents
            numbers = inputs * width + rows * (inputs + width) + self.agents * self.rank * outputs
            return self._kernel(2.0 * rows * inputs * width, numbers, rate)

        def other(numbers: float) -> float:
            return self._kernel(0.0, rows * numbers, rate)

        layer = sum(product(*linear) for linear in self.linears)
        layer += other(2 * (s.query_width + 2 * s.kv_width))
        layer += other(2 * s.kv_width * columns + 2 * s.query_width)
        layer += 2 * other(4 * s.hidden) + other(3 * s.inner)
        words = s.vocabulary
        head = self._kernel(2.0 * rows * s.hidden * words, words * (s.hidden + rows), rate)
        return s.layers * layer + head + 2 * other(words) + 3 * LAUNCH

    def rollout(self, rows: int, prompts: int, prompt: int, output: int) -> float:
        """Return the seconds to sample `rows` completions of `prompts` prompts.

        `prompt` is the number of tokens of a prompt, `output` that of a completion.
        """
        steps = (output - 1) * self.step(rows, prompt + output // 2)
        flops = sum(2.0 * inputs * outputs for inputs, outputs, _ in self.linears)
        tokens = prompts * prompt
        prefill = self.shape.layers * self._kernel(tokens * flops, 12.0 * tokens * self.shape.inner,
                                                   self.card.copy, 9)  # fmt: skip
        return steps + prefill + CAPTURE

    def learn(self, rows: int, prompts: int, prompt: int, output: int) -> float:
        """Return the seconds of a forward and backward of `rows` rows; arguments: see `rollout`."""
        s, copy = self.shape, self.card.copy
        hidden, inner, rests = s.hidden, s.inner, rows * (output - 1)
        tokens = prompts * prompt + rests

        def kernel(flops: float, numbers: float, launches: int = 1) -> float:
            return self._kernel(flops, numbers, copy, launches)

        layer = 0.0
        for inputs, outputs, ranks in self.linears:
            low, both = 2.0 * tokens * ranks, inputs + outputs
            layer += 2 * kernel(2.0 * tokens * inputs * outputs, tokens * both + inputs * outputs)
            # Products with A and B of each token's own agent, forward and backward, and their
            # gradients.
            layer += kernel(low * inputs, tokens * inputs)
            layer += kernel(low * outputs, 2 * tokens * outputs)
            layer += kernel(low * outputs, tokens * outputs)
            layer += kernel(low * inputs, 2 * tokens * inputs)
            layer += kernel(low * both, tokens * both)
        qkv = s.query_width + 2 * s.kv_width
        pairs = prompts * prompt**2 / 2 + rows * (output**2 / 2 + output * prompt)
        attended = 4.0 * pairs * s.query_width
        # Flash kernels reach about half of the peak, and their backward has products for five.
        layer += kernel(2 * attended, 2 * tokens * qkv, 2) + kernel(0, 3 * rests * hidden)
        layer += kernel(5 * attended, 8 * tokens * qkv, 10) + 2 * kernel(0, 2.5 * tokens * qkv)
        layer += 4 * kernel(0, 4 * tokens * hidden)
        layer += kernel(0, 3 * tokens * inner) + kernel(0, 6 * tokens * inner)
        sampled, words = rows * output, s.vocabulary
        head = 2 * kernel(2.0 * sampled * hidden * words, sampled * words)
        return s.layers * layer + head + kernel(0, 3 * sampled * words)


class Duration(NamedTuple):
    """The seconds of a run by phase, without rewards, if all completions have the greatest length.

    Attributes:
        generate: Seconds of sampling in all steps.
        learn: Seconds of learning in all steps.
        evaluate: Seconds of all evaluations, including the final comparison and the test.
        measured: When the rates of the GPU were measured; empty if they are from its data sheet.
    """

    generate: float
    learn: float
    evaluate: float
    measured: str

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return self.generate + self.learn + self.evaluate


def duration_of(
    config: RunConfig,
    fit: Fit,
    *,
    prompt: int,
    turns: int,
    rows: int,
    evaluated: Sequence[float],
) -> Duration | None:
    """Return the predicted seconds of a run.

    None if the run does not fit in memory, or if the speed of its GPU, base or engine is unknown.

    Args:
        config: The settings of the run.
        fit: The device and the memory of the run.
        prompt: Number of tokens of a prompt; 0 if unknown.
        turns: Number of completions of an episode.
        rows: Number of rows of all agents in a step.
        evaluated: Number of rows of each evaluation.
    """
    setup, memory, prompt = fit.setup, fit.plan, prompt or PROMPT_TOKENS
    size, engine, algorithm = setup.size, config.engine, config.algorithm
    card = None if setup.gpu is None else setup.gpu.card
    work = work_of(config, size, setup.output, setup.device, setup.processes)
    unsupported = engine.quantization is not None or engine.offload_adapters or setup.processes > 1
    unsupported = unsupported or not engine.cuda_graphs
    half = memory.dtype in ("bfloat16", "float16")
    if card is None or work is None or size.shape is None or unsupported or not (half and fit.fits):
        return None
    counted = Counted(size.shape, card, work.agents, work.rank)
    kernels, output = work.kernels and memory.dtype == "bfloat16", setup.output
    steps_by = STEP_BY_TORCH
    if not engine.rollout_settings.shares_base:
        steps_by = STEP_BY_VLLM
    elif kernels:
        steps_by = 1.0

    def generation(count: float, samples: int) -> float:
        batches = max(engine.parts(), ceil(count / memory.decode_rows))
        each = ceil(count / max(1, batches))
        return batches * steps_by * counted.rollout(each, ceil(each / samples), prompt, output)

    steps = config.population.rounds * config.population.steps_per_round
    group, fitness = algorithm.group_size, config.evolve.fitness
    most = engine.max_rows_per_microbatch or rows
    least = max(engine.parts(), ceil(rows / most))
    work_of_step = rows, group, prompt, turns * output
    pass_seconds = _learning(counted, memory, work_of_step, kernels=kernels, least=least)
    # A forward pass is half of forward and backward, as the base has no gradients: again for each
    # epoch with checkpointing, and once a call for the reference.
    epoch_passes = 1.5 if engine.gradient_checkpointing else 1.0
    reference_passes = 0.5 if algorithm.beta or "beta" in config.search_space().names() else 0.0
    samples = fitness.per_prompt(fitness.samples)
    return Duration(
        generate=steps * turns * generation(rows, group),
        learn=steps * pass_seconds * (algorithm.update_epochs * epoch_passes + reference_passes),
        evaluate=turns * sum(generation(count, samples) for count in evaluated if count),
        measured=card.measured,
    )


def _learning(
    counted: Counted,
    memory: MemoryPlan,
    work: tuple[int, int, int, int],
    *,
    kernels: bool,
    least: int,
) -> float:
    """Return the seconds of one forward and backward of all rows, in `least` micro-batches or more.

    `work` has the numbers of rows, rows per prompt, tokens of a prompt, tokens of a completion.
    """
    rows, group, prompt, output = work
    tokens = ceil(rows / group) * prompt + rows * output
    pieces = min(rows, max(least, ceil(tokens / memory.micro_batch_tokens)))
    each = ceil(rows / pieces)
    device = counted.learn(each, ceil(each / group), prompt, output)
    launches = counted.shape.layers * (LAUNCHES if kernels else LAUNCHES_BY_TORCH)
    return pieces * max(device * (1 if kernels else LEARN_BY_TORCH), launches * HOST_LAUNCH)
