"""Handles errors of a device: halves batches if memory runs out, and reports a failed device."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager

import torch

from evo_grpo.errors import FailedDeviceError, RunFailedError

_MESSAGES = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Parts of messages of torch on a CPU, drivers and libraries, which raise RuntimeErrors."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)
    )


def halved(
    setting: str,
    value: int,
    needed: int,
    error: BaseException,
    remedy: str,
    *,
    unit: int = 1,
    repeats: bool = True,
) -> int:
    """Return half of a bound that was too large for the device's memory, and warn.

    `setting` is the path of the setting and `value` the bound that it sets; the failed work used
    `needed` of it. Half of the smaller number is rounded down to a multiple of `unit`.
    RunFailedError is raised if the bound cannot be halved, with `remedy` as advice, or if the work
    cannot be repeated (`repeats` is False), as when several processes share it.
    """
    line = str(error).splitlines()[0][:200]
    half = min(value, needed) // 2 // unit * unit
    problem = ""
    if not repeats:
        problem = (
            f"({line}), and what processes compute together is not repeated; lower {setting}, "
            f"which is {value}, and resume the run"
        )
    elif half < 1:
        problem = f"over the least that can be computed at once ({line}); {remedy}"
    if problem:
        raise RunFailedError(f"{setting}: the device ran out of memory {problem}") from error
    warnings.warn(
        f"out of memory: {setting} is {half} from now on (it was {value}); set it so to spare the "
        "attempt",
        UserWarning,
        stacklevel=4,
    )
    return half


@contextmanager
def naming_failed_device() -> Generator[None]:
    """Raise FailedDeviceError in place of a CUDA error after which the process cannot go on."""
    try:
        yield
    except RuntimeError as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        failed = isinstance(error, torch.AcceleratorError) or "CUDA error" in text
        if not failed or is_out_of_memory(error):
            raise
        raise FailedDeviceError(
            f"engine.device: the device failed ({text}), and this process cannot use it any more; "
            "look at it with nvidia-smi; a run folder has the finished rounds: continue in a new "
            "process with: evo-grpo resume RUN"
        ) from error


def free_cached() -> None:
    """Release torch's cached memory; call it after `except`, which keeps the error's tensors."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
