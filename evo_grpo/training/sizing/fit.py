"""Whether a run fits into a memory, and the settings with which it would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from evo_grpo.errors import ConfigError
from evo_grpo.settings import RunConfig
from evo_grpo.training.sizing.fitting import (
    ROWS,
    TOKENS,
    Proposal,
    Setup,
    fill_limits,
    propose,
)
from evo_grpo.training.sizing.gpus import Gpu
from evo_grpo.training.sizing.memory import Device, MemoryPlan
from evo_grpo.training.sizing.model_size import ModelSize
from evo_grpo.training.sizing.planning import format_bytes, machine_memory

MACHINE = "this machine"
"""Name of the memory of a CPU."""


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
