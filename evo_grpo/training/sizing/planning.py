"""Plans the memory of a run and checks whether a machine has enough."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from evo_grpo.errors import ConfigError
from evo_grpo.settings import RunConfig
from evo_grpo.settings.adapters import above_width, missing_layers, too_wide
from evo_grpo.settings.algorithm import DEFAULT_PROMPTS
from evo_grpo.training.sizing.memory import DTYPE_BYTES, Device, MemoryPlan, Part, Work, predict
from evo_grpo.training.sizing.model_size import (
    ModelSize,
    adapted_layers,
    classifier_parameters,
    lora_parameters,
)

#: Assumed tokens of a prompt, unless `algorithm.max_model_len` is set.
PROMPT_TOKENS = 128
#: Relative error of a plan. A run is refused if it would not fit even with this error.
TOLERANCE = 0.2
#: Model types whose layers run joined: those of `model.llama.families`, which needs no loading.
SPECIALISED = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "smollm3",
    "granite",
    "olmo2",
    "olmo3",
    "gemma3_text",
)
#: Model types whose queries and keys have norms of their own.
_HEAD_NORMS = ("qwen3", "olmo2", "olmo3", "gemma3_text")
_SIGNS_OF_A_DEVICE = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def plan_memory(
    config: RunConfig,
    size: ModelSize,
    output: int,
    *,
    dtype: str,
    device: Device,
    processes: int = 1,
    capacity: int | None = None,
) -> MemoryPlan | None:
    """Return the peak memory of each process of a run; None if unknown.

    Args:
        config: The settings of the run.
        size: The size of the base model.
        output: Tokens of the longest completion.
        dtype: Dtype of the base.
        device: Device of the base.
        processes: Number of processes.
        capacity: Bytes of the device; None if unknown.
    """
    lora = config.largest_lora
    parameters = lora_parameters(size, lora)
    if parameters is None:
        return None
    algorithm, fitness, population = config.algorithm, config.evolve.fitness, config.population
    # The first round has the most agents. With ZeRO every process has all agents.
    dealt = 1 if config.engine.zero is not None else processes
    agents = -(-population.size // dealt)
    divided = config.engine.base == "sharded" or config.engine.zero == 3
    # The agents of a shard generate and learn in one batch.
    together = -(-population.size // config.engine.parts(dealt))
    offloads = config.engine.offload_adapters and device == "cuda"
    prompts = algorithm.prompts_per_step or DEFAULT_PROMPTS
    rows = together * prompts * algorithm.group_size
    context = algorithm.max_model_len or min(size.context or 1 << 30, PROMPT_TOKENS + output)
    work = Work(
        agents=agents,
        archive=config.evolve.keeps_archive,
        references=algorithm.separate_reference,
        start=config.model.adapter is not None and not algorithm.separate_reference,
        parameters=parameters,
        rank=max([lora.r, *lora.rank_pattern.values()]),
        rows=rows if config.engine.zero is None else -(-rows // processes),
        evaluation_rows=together * fitness.prompts * fitness.per_prompt(fitness.samples),
        prompt_tokens=max(1, context - output),
        output_tokens=output,
        filtered=algorithm.top_p < 1 or algorithm.top_k > 0,
        specialised=(
            size.architecture in SPECIALISED
            and config.engine.each_alone
            and config.engine.quantization is None
            and not lora.dropout
        ),
        shards=processes if divided else 1,
        group=algorithm.group_size,
        least_rows=together * algorithm.group_size,
        head_norms=size.architecture in _HEAD_NORMS,
        # The part that computes, and the next one.
        resident=min(agents, 2 * together) if offloads else None,
    )
    return predict(
        size,
        work,
        config.engine,
        dtype=dtype,
        device=device,
        capacity=capacity,
        others=reward_models(config, device),
    )


def reward_models(config: RunConfig, device: Device) -> list[Part]:
    """Return the weights of each reward model, 0 bytes for one of unknown size.

    Raises:
        ModelError: A reward model does not exist, or its files are damaged.
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


def check_fits(plan: MemoryPlan | None, there: int | None, device: str) -> None:
    """Refuse a plan that cannot fit into the memory of a device.

    Args:
        plan: The plan; None if unknown.
        there: Bytes of the device; None if unknown.
        device: Name of the device for the message.

    Raises:
        ConfigError: The plan does not fit even if it is too high by `TOLERANCE`.
    """
    if plan is None or there is None or plan.peak * (1 - TOLERANCE) <= there:
        return
    part = plan.largest
    raise ConfigError(
        f"memory: expected a run that fits into the {format_bytes(there)} of {device}, got one "
        f"that takes about {format_bytes(plan.peak)}; the largest part is {part.name} with "
        f"{format_bytes(part.bytes)}: lower {part.settings}; evo-grpo check proposes values"
    )


def check_adapters_fit(config: RunConfig, size: ModelSize) -> None:
    """Check adapters that may be searched against the layers of the model, if these are known.

    Raises:
        ConfigError: A set of layers names one that the model lacks, or a rank is above the width
            of a layer.
    """
    lora = config.model.lora
    for name, targets in lora.target_sets.items() if size.linears else ():
        if text := missing_layers(targets, size.linears, size.name, lora.exclude_modules or ()):
            raise ConfigError(f"model.lora.target_sets.{name}: {text}")
    layers = adapted_layers(size, config.largest_lora)
    narrow = min(layers, key=lambda name: min(layers[name]), default=None)
    if narrow is None:
        return
    if text := too_wide(config.search_space(), narrow, min(layers[narrow])):
        raise ConfigError(f"evolve.hyperparameters.lora.r: {text}")
    text = above_width(config.model.lora.r, narrow, min(layers[narrow]))
    if config.model.adapter is None and text:
        raise ConfigError(f"model.lora.r: {text}; lower it")


def format_bytes(size: int) -> str:
    """Format a number of bytes in decimal units: 934 kB, 1.8 MB."""
    value = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return (
                f"{value:.0f} {unit}" if value >= 10 or unit == "bytes" else f"{value:.1f} {unit}"
            )
        value /= 1000
    return f"{value:.1f} TB"


def machine_memory() -> int | None:
    """Return the bytes of memory of this machine or container, per process; None if unknown."""
    try:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not available on every system
        return None
    for name in _LIMITS:
        try:
            found = min(found, int(Path(name).read_text()))
        except (OSError, ValueError):  # "max", or no such file
            continue
    # The processes of a launcher on one machine share its memory.
    return found // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))


def cuda_devices() -> list[int | None] | None:
    """Return the CUDA devices that this process may use, as nvidia-smi lists them.

    Returns:
        The bytes of each device, None for a device whose memory is unknown; or None if the devices
        are unknown.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        # A device may exist without nvidia-smi, in containers and on boards; ROCm is "cuda" too.
        return None if any(Path(path).exists() for path in _SIGNS_OF_A_DEVICE) else []
    try:
        said = subprocess.run(
            [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):  # nvidia-smi does not start, or hangs
        return None
    if said.returncode != 0:  # no device, or no driver
        return []
    lines = [line.strip() for line in said.stdout.splitlines() if line.strip()]
    return _visible([int(line) << 20 if line.isdigit() else None for line in lines])


def torch_build(version: Any) -> str:  # noqa: ANN401 -- the module torch.version
    """Return what a build of torch is for: "CPUs", "CUDA 13.0" or "ROCm 7.1"."""
    hip, cuda = getattr(version, "hip", None), version.cuda
    return f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "CPUs"


def unseen_gpus(build: str) -> str | None:
    """Return a clause with the remedy if this machine has GPUs, which torch does not see.

    Call it where torch sees no GPU; `build` is that of `torch_build`.
    """
    visible = cuda_devices()
    if not visible:
        return None
    seen = "a GPU" if len(visible) == 1 else f"{len(visible)} GPUs"
    remedy = (
        "install torch's build for CUDA (pytorch.org, or docs/install.md)"
        if not build.startswith("CUDA")
        else "the driver may be too old for it; update the driver, or install torch's build for an "
        "older CUDA"
    )
    return f"nvidia-smi lists {seen}, and torch, built for {build}, sees none: {remedy}"


def _visible(devices: list[int | None]) -> list[int | None]:
    """Return the devices that CUDA_VISIBLE_DEVICES selects, which nvidia-smi ignores."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return devices
    found: list[int | None] = []
    for name in map(str.strip, chosen.split(",")):
        if name.startswith(("GPU-", "MIG-")):
            found.append(None)
        elif name.isdigit() and int(name) < len(devices):
            found.append(devices[int(name)])
        else:  # CUDA ignores all further entries
            break
    return found
