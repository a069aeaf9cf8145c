"""Finds the memory of a machine, the batches that fit in it, and settings that would fit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from evo_grpo.errors import ConfigError, EvoGrpoError
from evo_grpo.schema.hparams import LORA
from evo_grpo.settings import RunConfig
from evo_grpo.settings.cross_checks import LEAST_PARTS
from evo_grpo.settings.engine import DECODE_ROWS
from evo_grpo.training.sizing import memory
from evo_grpo.training.sizing.cards import Gpu, cuda_devices
from evo_grpo.training.sizing.model_size import ModelSize

MACHINE = "this machine"
"""Name of a CPU's memory in messages."""
#: The limits of a batch, of `engine`, which a run chooses where they are null.
LIMITS = ("max_decode_rows", "max_tokens_per_microbatch")
#: Share of a memory that is planned for: allocators leave some of it in gaps.
ROOM = 0.95
#: Relative error of a plan. A run is refused if it would not fit even with this error.
TOLERANCE = 0.2
#: Most rows and tokens that are chosen on a GPU; larger batches are hardly faster.
MOST_ROWS, MOST_TOKENS = 4096, 65536
#: Rows and tokens on a GPU of unknown memory.
FEW_ROWS, FEW_TOKENS = 128, 1024
#: An engine with separate memory decodes as many rows as fit there. Its logits grow with the number
#: of rows, so a GPU below this size gets fewer.
SMALL_GPU, FEW_OF_ENGINE = 70 * 10**9, 256
#: Shards that are proposed for agents in host memory: two of them are on the device at once.
_SHARDS = 4
#: Rank and number of agents that are proposed if nothing else suffices.
_FEW_RANKS, _FEW_AGENTS = 8, 4
_STEPS = sorted({2**n for n in range(17)} | {3 * 2**n for n in range(15)})
_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Setup(NamedTuple):
    """The machine and the device on which a run computes.

    Attributes:
        size: The size of the base.
        output: Tokens of the longest completion.
        dtype: Dtype of the base, unless the settings name one.
        device: Device of the base.
        capacity: Bytes that each process may use; 0 if unknown.
        place: What sets `capacity`, for messages: a device, or the setting engine.memory.
        processes: Number of processes.
        gpu: The GPU, if the device is a GPU of known memory.
        total: Bytes of the whole device, from which vLLM's share is computed; 0 means `capacity`.
    """

    size: ModelSize
    output: int
    dtype: str
    device: memory.Device
    capacity: int = 0
    place: str = MACHINE
    processes: int = 1
    gpu: Gpu | None = None
    total: int = 0

    def plan(self, config: RunConfig, **limits: int) -> memory.MemoryPlan | None:
        """Predict the memory of a run that has the batch limits `limits`; None if unknown."""
        work = memory.work_of(config, self.size, self.output, self.device, self.processes)
        if work is None:
            return None
        engine = config.engine.model_copy(update=limits)
        return memory.predict(
            self.size,
            work,
            engine,
            dtype=self.dtype if engine.dtype == "auto" else engine.dtype,
            device=self.device,
            capacity=self.total or self.capacity or None,
            others=memory.reward_models(config, self.device),
        )

    def shortage(self, plan: memory.MemoryPlan) -> str:
        """Return a clause on the memory that a run needs and the memory that it may use."""
        part = plan.largest
        return (
            f"the run takes about {format_bytes(plan.peak)} of memory and {self.place} has "
            f"{format_bytes(self.capacity)}; the largest part is {part.name} "
            f"({format_bytes(part.bytes)})"
        )


def choose_limits(config: RunConfig, setup: Setup) -> dict[str, int]:
    """Return, for each limit in `LIMITS` that is null, the greatest value that fits in memory.

    If none fits, the value is the least possible one. The result is empty for a model of unknown
    size, and on a CPU if `engine.memory` is not set.
    """
    rows, tokens = LIMITS
    engine, on_cpu, limits = config.engine, setup.device == "cpu", dict[str, int]()
    plan = None if on_cpu and engine.memory is None else setup.plan(config, **{rows: 1})
    if plan is None:
        return limits
    if engine.max_decode_rows is None:
        if engine.rollout_settings.shares_base:
            most = DECODE_ROWS if on_cpu else MOST_ROWS
            # The completions of one prompt are not split.
            limits[rows] = _largest(config, setup, limits, rows, plan.decode_rows, most)
        else:
            small = not on_cpu and setup.capacity < SMALL_GPU
            limits[rows] = FEW_OF_ENGINE if small else DECODE_ROWS
    if engine.max_tokens_per_microbatch is None:
        most = max(plan.micro_batch_tokens if on_cpu else MOST_TOKENS, plan.row)
        limits[tokens] = _largest(config, setup, limits, tokens, plan.row, most)
    return limits


def _largest(
    config: RunConfig, setup: Setup, known: Mapping[str, int], name: str, least: int, most: int
) -> int:
    """Return the largest value of the limit `name` that fits in memory, or `least` if none fits.

    The value is at most `most`. `known` has the limits chosen before. Of values that need equal
    memory, the least is returned.
    """
    needed: dict[int, int] = {}
    for value in (least, *(step for step in _STEPS if least < step <= most)):
        plan = setup.plan(config, **{**known, name: value})
        assert plan is not None
        phase = plan.sampling if name == LIMITS[0] else plan.learning
        needed[value] = memory.total(plan.held) + memory.total(phase)
    best = max((v for v in needed if needed[v] <= setup.capacity * ROOM), default=least)
    return next(value for value in needed if needed[value] == needed[best])


class Fit(NamedTuple):
    """Whether a run fits in the memory of its device, and which settings would help.

    Attributes:
        setup: The device of the run.
        plan: The memory of the run on this device.
        chosen: Name of each batch limit that is null -> the number that a run will choose.
        changes: Dotted name -> value of each setting in which a proposed run differs from the
            configured one; empty for the configured run.
        proposal: The `Fit` of a run whose changes make it fit; None if this run fits, or if no
            change helps.
    """

    setup: Setup
    plan: memory.MemoryPlan
    chosen: Mapping[str, int]
    changes: Mapping[str, object] = MappingProxyType({})
    proposal: Fit | None = None

    @property
    def fits(self) -> bool:
        """Whether the run fits in memory, and no limit of its rollout engine is too low."""
        return self.plan.fits(self.setup.capacity)

    def sentence(self) -> str:
        """Return a sentence on what the run lacks, and on the settings that would help."""
        text = self.setup.shortage(self.plan)
        if self.plan.peak <= self.setup.capacity:
            text = "; ".join(self.plan.shortages)
        if self.proposal is None:
            return (
                f"{text}; none of the changes that were tried make it fit: take a smaller model or "
                "fewer agents, or divide the base among devices with engine.base: sharded"
            )
        values = {n: json.dumps(value).strip('"') for n, value in self.proposal.changes.items()}
        options = " ".join(f"--set {name}={value}" for name, value in values.items())
        return f"{text}; it takes about {format_bytes(self.proposal.plan.peak)} with {options}"


def fit_of(config: RunConfig, setup: Setup) -> Fit | None:
    """Return the `Fit` of a run, with a proposal if it does not fit; None if memory is unknown."""
    limits = choose_limits(config, setup)
    plan = setup.plan(config, **limits)
    if plan is None:
        return None
    numbers = {f"engine.{name}": value for name, value in limits.items()}
    return Fit(
        setup, plan, numbers, proposal=None if plan.fits(setup.capacity) else propose(config, setup)
    )


def propose(config: RunConfig, setup: Setup) -> Fit | None:
    """Return the `Fit` of the first proposal that fits, without needless changes; else None."""
    for changes in _proposals(config, setup):
        if (fit := _tried(config, setup, changes)) is None:
            continue
        for name in reversed(changes):  # leave out what the last change has made unnecessary
            fewer = {key: value for key, value in changes.items() if key != name}
            if (less := _tried(config, setup, fewer)) is not None:
                fit, changes = less, fewer
        return fit
    return None


def _proposals(config: RunConfig, setup: Setup) -> Iterator[dict[str, object]]:
    """Yield sets of changes that save memory, the cheapest first; each contains the set before."""
    engine, plan = config.engine, setup.plan(config)
    # Where limits are null, a run chooses them, on a CPU if it is told the memory.
    changes: dict[str, object] = {f"engine.{name}": None for name in LIMITS}
    if setup.device == "cpu":
        changes["engine.memory"] = engine.memory or f"{setup.capacity // 10**6}MB"
    for remedy in () if plan is None else plan.remedies:
        changes |= {f"engine.{engine.rollout}.{name}": value for name, value in remedy.items()}
    yield dict(changes)
    changes["engine.gradient_checkpointing"] = True
    if setup.device == "cuda" and engine.each_alone:
        changes["engine.shards"] = _SHARDS if engine.parts() < LEAST_PARTS else engine.shards
        changes["engine.offload_adapters"] = True
    yield dict(changes)
    if setup.device == "cuda" and engine.dtype == "float32":
        changes["engine.dtype"] = "auto"
    quantizes = engine.each_alone and not config.model.name.endswith(".gguf")
    if quantizes and engine.quantization is None:
        changes["engine.quantization"] = "int8"
    yield dict(changes)
    if quantizes and not any(n % 64 for ends in setup.size.linears.values() for n in ends):
        changes["engine.quantization"] = "nf4"
    yield dict(changes)
    if f"{LORA}r" not in config.search_space().names():
        changes["model.lora.r"] = min(_FEW_RANKS, config.model.lora.r)
    if not isinstance(config.population.sizes, list):
        changes["population.size"] = min(_FEW_AGENTS, config.population.size)
    yield dict(changes)


def _tried(config: RunConfig, setup: Setup, changes: Mapping[str, object]) -> Fit | None:
    try:
        tried = changed(config, changes)
    except EvoGrpoError:  # the settings contradict the change
        return None
    limits = choose_limits(tried, setup)
    plan = setup.plan(tried, **limits)
    if plan is None or not plan.fits(setup.capacity * ROOM):
        return None
    new = {name: value for name, value in changes.items() if attrgetter(name)(config) != value}
    return Fit(setup, plan, limits, new)


def changed(config: RunConfig, changes: Mapping[str, object]) -> RunConfig:
    """Return settings with `changes`, dotted name -> value; ConfigError if settings contradict."""
    for name, value in changes.items():
        config = _changed(config, name.split("."), value)
    return config


def _changed(group: Any, path: Sequence[str], value: object) -> Any:  # noqa: ANN401 -- any group
    first, *rest = path
    inner = _changed(getattr(group, first), rest, value) if rest else value
    return group.replace(**{first: inner})


def dtypes(config: RunConfig, gpu: Gpu | None = None) -> dict[str, memory.Device]:
    """Return the dtypes that the base may have, each with its device; only one if `gpu` is set."""
    dtype, device = config.engine.dtype, config.engine.device
    if gpu is not None:
        if device in ("cpu", "mps"):
            raise ConfigError(
                f"--gpu: expected engine.device auto or cuda, got {device}; leave one of them out"
            )
        device = "cuda"
    if dtype != "auto":
        return {dtype: "cuda" if device.startswith("cuda") else "cpu"}
    half = "float16" if gpu is not None and gpu.older else "bfloat16"
    if device == "auto":
        return {"float32": "cpu", half: "cuda"}
    return {half: "cuda"} if device.startswith("cuda") else {"float32": "cpu"}


def setup_here(
    config: RunConfig,
    base: ModelSize,
    longest: int,
    gpu: Gpu | None = None,
) -> Setup | None:
    """Return the `Setup` of a run, without torch; None if the memory of the device is unknown.

    `longest` is the number of tokens of the longest completion. `gpu` is the card to plan for; None
    plans for this machine.
    """
    listed = [] if gpu is not None else cuda_devices()
    devices = [entry for entry in listed if entry is not None]
    processes = config.most_processes if config.engine.base == "sharded" else 1
    for dtype, device in dtypes(config, gpu).items():
        card = gpu
        if gpu is not None:
            place, capacity = gpu
        elif device == "cuda":
            # torch may number devices in another order than nvidia-smi.
            card = min(devices, key=lambda gpu_seen: gpu_seen.bytes, default=None)
            unlike = len({device.bytes for device in devices}) > 1
            place = "the smallest CUDA device" if unlike else "the CUDA device"
            capacity = None if card is None else card.bytes
            if card is not None and card.older and config.engine.dtype == "auto":
                dtype = "float16"
        elif config.engine.device == "auto" and listed:
            continue  # the run would use CUDA
        else:
            place, capacity = MACHINE, machine_memory()
        place, capacity = within(config, place, capacity)
        if capacity is not None:
            return Setup(base, longest, dtype, device, capacity, place, processes, card)
    return None


def within(config: RunConfig, place: str, capacity: int | None) -> tuple[str, int | None]:
    """Return (`place`, `capacity`), or ("engine.memory", the lesser number) if that is set."""
    budget = config.engine.memory_bytes
    return (
        (place, capacity) if budget is None else ("engine.memory", min(budget, capacity or budget))
    )


def format_bytes(size: int) -> str:
    """Format a number of bytes in decimal units: 934 kB, 1.8 MB."""
    value = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.{0 if value >= 10 or unit == 'bytes' else 1}f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def machine_memory() -> int | None:
    """Return the bytes of memory that each process on this machine may use; None if unknown."""
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not available on every system
        return None
    for name in _CGROUPS:
        try:
            size = min(size, int(Path(name).read_text()))
        except (OSError, ValueError):  # "max", or no such file
            continue
    # The processes of a launcher on one machine share its memory.
    return size // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
