"""Whether a run fits into a memory: the limits of its engine there, and settings that would fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from evo_grpo.errors import ConfigError, EvoGrpoError
from evo_grpo.schema.hparams import LORA
from evo_grpo.settings import RunConfig
from evo_grpo.settings.cross_checks import LEAST_PARTS
from evo_grpo.settings.engine import DECODE_ROWS
from evo_grpo.training.sizing.gpus import Gpu
from evo_grpo.training.sizing.memory import Device, MemoryPlan, total
from evo_grpo.training.sizing.model_size import ModelSize
from evo_grpo.training.sizing.planning import format_bytes, machine_memory, plan_memory

MACHINE = "this machine"
"""Name of the memory of a CPU."""
ROWS, TOKENS = "engine.max_decode_rows", "engine.max_tokens_per_microbatch"
#: The same settings, by their names in `engine`.
LIMITS = ("max_decode_rows", "max_tokens_per_microbatch")
#: Share of a memory that is planned for: allocators leave some of it in gaps.
ROOM = 0.95
#: Most rows and tokens that are chosen on a GPU; larger batches are hardly faster.
MOST_ROWS, MOST_TOKENS = 4096, 16384
#: Fewer rows and tokens are proposed only if nothing else fits: they make a run slow.
FEW_ROWS, FEW_TOKENS = 128, 1024
#: An engine with a memory of its own decodes as many as fit there. Its tensors of logits grow with
#: the number, so a GPU below this size gets a lower one.
SMALL_GPU, FEW_OF_ENGINE = 70 * 10**9, 256
#: Shards that are proposed for agents in host memory: two of them are on the device at once.
_SHARDS = 4
_STEPS = sorted({2**n for n in range(15)} | {3 * 2**n for n in range(13)})


class Setup(NamedTuple):
    """Where a run computes.

    Attributes:
        size: The size of the base.
        output: Tokens of the longest completion.
        dtype: Dtype of the base.
        device: Device of the base.
        capacity: Bytes that each process may use.
        processes: Number of processes.
    """

    size: ModelSize
    output: int
    dtype: str
    device: Device
    capacity: int
    processes: int = 1

    def plan(self, config: RunConfig) -> MemoryPlan | None:
        """Return the memory of a run; None if unknown."""
        explicit = config.engine.dtype
        return plan_memory(
            config,
            self.size,
            self.output,
            dtype=self.dtype if explicit == "auto" else explicit,
            device=self.device,
            processes=self.processes,
            capacity=self.capacity,
        )

    def fits(self, config: RunConfig) -> bool:
        """Return whether a run fits with some room."""
        plan = self.plan(config)
        return plan is not None and plan.fits(self.capacity * ROOM)


class Proposal(NamedTuple):
    """Changes of settings with which a run fits.

    Attributes:
        changes: Dotted name -> value.
        config: The settings with the changes.
        plan: Their memory.
    """

    changes: Mapping[str, object]
    config: RunConfig
    plan: MemoryPlan

    def text(self) -> str:
        """Return the changes as options of the command line."""
        return " ".join(f"--set {name}={_written(value)}" for name, value in self.changes.items())


def fill_limits(
    config: RunConfig, setup: Setup, *, few_rows: int = 1, few_tokens: int = 1
) -> RunConfig:
    """Return the settings with numbers in place of null for rows and tokens: the most that fit.

    If even the least number does not fit, that number is chosen. Settings that are given stay, and
    so does null for a model of unknown size.

    Args:
        config: The settings.
        setup: Where the run computes.
        few_rows: Least number of rows to choose.
        few_tokens: Least number of tokens to choose.
    """
    if config.engine.max_decode_rows is None:
        if config.engine.rollout_settings.shares_base:
            most = DECODE_ROWS if setup.device == "cpu" else MOST_ROWS
            config = _largest(config, setup, ROWS, few_rows, most)
        elif setup.plan(config) is not None:
            small = setup.device == "cuda" and setup.capacity < SMALL_GPU
            config = changed(config, {ROWS: FEW_OF_ENGINE if small else DECODE_ROWS})
    if config.engine.max_tokens_per_microbatch is None and (plan := setup.plan(config)):
        most = plan.micro_batch_tokens if setup.device == "cpu" else MOST_TOKENS
        config = _largest(config, setup, TOKENS, max(few_tokens, plan.row), max(most, plan.row))
    return config


def with_few(config: RunConfig) -> RunConfig:
    """Return the settings with low numbers in place of null, for a GPU of unknown memory."""
    few = {ROWS: FEW_ROWS, TOKENS: FEW_TOKENS}
    return changed(config, {n: value for n, value in few.items() if _read(config, n) is None})


def _largest(config: RunConfig, setup: Setup, name: str, least: int, most: int) -> RunConfig:
    """Return the settings with the largest value of a limit, among the steps, that fits."""
    smallest = setup.plan(changed(config, {name: least}))
    if smallest is None:
        return config
    if name == ROWS:  # the completions of one prompt are not split
        least = max(least, smallest.decode_rows)
    found: tuple[int, RunConfig] | None = None
    for value in (*(step for step in reversed(_STEPS) if least < step <= most), least):
        tried = changed(config, {name: value})
        plan = setup.plan(tried)
        assert plan is not None
        needed = total(plan.held) + total(plan.sampling if name == ROWS else plan.learning)
        if found is None:
            if needed <= setup.capacity * ROOM or value == least:
                found = needed, tried
        elif needed == found[0]:
            found = needed, tried  # the larger number is never reached
        else:
            break
    assert found is not None
    return found[1]


def propose(config: RunConfig, setup: Setup) -> Proposal | None:
    """Return changes with which a run fits, the cheapest first; None if there are none.

    Rows and tokens are lowered first, then settings that cost time, and at last the population or
    the adapters become smaller.
    """
    states = list(_states(config, setup))
    for few_rows, few_tokens in ((FEW_ROWS, FEW_TOKENS), (1, 1)):
        for changes in states:
            found = _with_limits(config, changes, setup, few_rows, few_tokens)
            if found is None:
                continue
            for name in reversed(changes):  # leave out what the last change has made unnecessary
                fewer = {key: value for key, value in changes.items() if key != name}
                less = _with_limits(config, fewer, setup, few_rows, few_tokens)
                if less is not None:
                    found, changes = less, fewer
            return found
    return None


def _with_limits(
    config: RunConfig, changes: Mapping[str, object], setup: Setup, few_rows: int, few_tokens: int
) -> Proposal | None:
    """Return changes with the fewest lower limits beside them; None if they do not fit."""
    for freed in ((), (ROWS,), (TOKENS,), (ROWS, TOKENS)):
        try:
            free = changed(config, {**changes, **dict.fromkeys(freed)})
        except EvoGrpoError:
            return None
        filled = fill_limits(free, setup, few_rows=few_rows, few_tokens=few_tokens)
        plan = setup.plan(filled)
        if plan is None or not plan.fits(setup.capacity * ROOM):
            continue
        limits = {name: _read(filled, name) for name in (ROWS, TOKENS) if name in freed}
        if any(_read(config, n) is not None and v > _read(config, n) for n, v in limits.items()):
            continue
        return Proposal({**limits, **changes}, filled, plan)
    return None


def _states(config: RunConfig, setup: Setup) -> Iterator[dict[str, object]]:
    """Yield growing sets of changes, the cheapest first."""
    changes: dict[str, object] = {}
    yield dict(changes)
    rollout, plan = config.engine.rollout, setup.plan(config)
    for remedy in () if plan is None else plan.remedies:
        changes |= {f"engine.{rollout}.{name}": value for name, value in remedy.items()}
        yield dict(changes)
    if not config.engine.gradient_checkpointing:
        changes["engine.gradient_checkpointing"] = True
        yield dict(changes)
    if config.engine.dtype == "float32" and setup.device == "cuda":
        changes["engine.dtype"] = "bfloat16"
        yield dict(changes)
    if offloading := _offloading(config, setup):
        changes |= offloading
        yield dict(changes)
    for quantization in _quantizations(config, setup):
        changes["engine.quantization"] = quantization
        yield dict(changes)
    rank = config.model.lora.r
    while rank > 4 and f"{LORA}r" not in config.search_space().names():
        rank //= 2
        changes["model.lora.r"] = rank
        yield dict(changes)
    size = config.population.size
    while size > 2:
        size = (size + 1) // 2
        changes["population.size"] = size
        yield dict(changes)


def _offloading(config: RunConfig, setup: Setup) -> Mapping[str, object]:
    """Return changes by which agents that do not compute leave the device; none if impossible."""
    engine = config.engine
    if setup.device != "cuda" or engine.offload_adapters or not engine.each_alone:
        return {}
    few = engine.parts() < LEAST_PARTS
    return {**({"engine.shards": _SHARDS} if few else {}), "engine.offload_adapters": True}


def _quantizations(config: RunConfig, setup: Setup) -> Sequence[str]:
    """Return stronger quantisations of the base than the present one."""
    engine, widths = config.engine, [n for ends in setup.size.linears.values() for n in ends]
    if not engine.each_alone or config.model.name.endswith(".gguf") or engine.quantization == "nf4":
        return ()
    four = ("nf4",) if all(width % 64 == 0 for width in widths) else ()
    return four if engine.quantization == "int8" else ("int8", *four)


def changed(config: RunConfig, changes: Mapping[str, object]) -> RunConfig:
    """Return the settings with dotted names changed.

    Raises:
        ConfigError: The settings contradict each other.
    """
    for name, value in changes.items():
        config = _changed(config, name.split("."), value)
    return config


def _changed(group: Any, path: Sequence[str], value: object) -> Any:  # noqa: ANN401 -- any group
    first, *rest = path
    inner = _changed(getattr(group, first), rest, value) if rest else value
    return group.replace(**{first: inner})


def _read(config: RunConfig, name: str) -> Any:  # noqa: ANN401 -- any setting
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


class Fit(NamedTuple):
    """Whether a run fits into the memory of a device.

    Attributes:
        place: Name of the device or limit.
        capacity: Its bytes.
        dtype: Dtype of the base there.
        plan: The memory of the run there.
        chosen: Dotted name of each limit that is null -> the number that a run will record.
        fits: Whether the run fits.
        proposal: Changes with which it would; None if it fits, or none were sought or found.
    """

    place: str
    capacity: int
    dtype: str
    plan: MemoryPlan
    chosen: Mapping[str, int]
    fits: bool
    proposal: Proposal | None

    def sentence(self) -> str:
        """Return what is missing, and which settings would help."""
        plan, part = self.plan, self.plan.largest
        text = (
            f"the run takes about {format_bytes(plan.peak)} of memory and {self.place} has "
            f"{format_bytes(self.capacity)}; the largest part is {part.name} "
            f"({format_bytes(part.bytes)})"
        )
        if plan.peak <= self.capacity:
            text = "; ".join(plan.shortages)
        if self.proposal is None:
            return (
                f"{text}; no settings were found with which it fits: take a smaller model, or "
                "divide the base among devices with engine.base: sharded"
            )
        if not self.proposal.changes:  # it fits, but without the usual room
            return text
        return (
            f"{text}; it takes about {format_bytes(self.proposal.plan.peak)} with "
            f"{self.proposal.text()}"
        )


def fit_of(
    config: RunConfig,
    base: ModelSize,
    output: int,
    *,
    dtype: str,
    device: Device,
    place: str,
    capacity: int,
    chooses: bool,
) -> Fit | None:
    """Return whether a run fits into so many bytes; None if its memory is unknown.

    Args:
        config: The settings of the run.
        base: The size of the base.
        output: Tokens of the longest completion.
        dtype: Dtype of the base.
        device: Where the base is.
        place: Name of the device or limit, for the message.
        capacity: Its bytes.
        chooses: Whether a run chooses numbers for the limits that are null.
    """
    processes = config.most_processes if config.engine.base == "sharded" else 1
    setup = Setup(base, output, dtype, device, capacity, processes)
    filled = fill_limits(config, setup) if chooses else config
    plan = setup.plan(filled)
    if plan is None:
        return None
    limits = {
        ROWS: (config.engine.max_decode_rows, filled.engine.max_decode_rows),
        TOKENS: (config.engine.max_tokens_per_microbatch, filled.engine.max_tokens_per_microbatch),
    }
    fits = plan.fits(capacity)
    return Fit(
        place,
        capacity,
        dtype,
        plan,
        {name: after for name, (before, after) in limits.items() if before is None and after},
        fits,
        propose(config, setup) if not fits else None,
    )


def dtypes(config: RunConfig, gpu: Gpu | None = None) -> dict[str, Device]:
    """Return the possible dtypes of the base, each with its device; for a GPU only its own."""
    dtype, device = config.engine.dtype, config.engine.device
    if gpu is not None:
        if device in ("cpu", "mps"):
            raise ConfigError(
                f"--gpu: expected engine.device auto or cuda, got {device}; leave one of them out"
            )
        return {"bfloat16" if dtype == "auto" else dtype: "cuda"}
    if dtype != "auto":
        return {dtype: "cuda" if device.startswith("cuda") else "cpu"}
    if device.startswith("cuda"):
        return {"bfloat16": "cuda"}
    return {"float32": "cpu", "bfloat16": "cuda"} if device == "auto" else {"float32": "cpu"}


def fit_on(
    config: RunConfig,
    base: ModelSize,
    longest: int,
    on: Mapping[str, Device],
    gpu: Gpu | None,
    cuda: Sequence[int | None] | None,
) -> Fit | None:
    """Return whether a run fits where it would compute; None if that is unknown.

    Args:
        config: The settings of the run.
        base: The size of the base.
        longest: Tokens of the longest completion.
        on: Possible dtypes of the base, each with its device; see `dtypes`.
        gpu: The card to plan for; None for the devices of this machine.
        cuda: Bytes of the CUDA devices of this machine; see `cuda_devices`.
    """
    budget = config.engine.memory_bytes
    devices = [size for size in cuda or () if size is not None]
    for dtype, device in on.items():
        if gpu is not None:
            place, capacity = gpu.name, gpu.bytes
        elif device == "cuda":
            # torch may number devices in another order than nvidia-smi.
            place = f"the {'smallest ' * (len(set(devices)) > 1)}CUDA device"
            capacity = min(devices, default=None)
        elif config.engine.device == "auto" and cuda:
            continue  # the run would use CUDA
        else:
            place, capacity = MACHINE, machine_memory()
        if budget is not None:
            place, capacity = "engine.memory", min(budget, capacity or budget)
        if capacity is not None:
            chooses = device == "cuda" or budget is not None
            return fit_of(
                config, base, longest, dtype=dtype, device=device, place=place,
                capacity=capacity, chooses=chooses,
            )  # fmt: skip
    return None
