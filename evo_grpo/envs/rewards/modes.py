"""The working folder and torch's modes, which user code must not leave changed.

The run finds its files by the one and computes under the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from evo_grpo.model.alone import beside_no_load

_modules = sys.modules
_folder = os.getcwd


class Mode(NamedTuple):
    """A mode: its name, the function that sets it (given torch and a value), and a remedy."""

    name: str
    set: Callable[[Any, Any], object]
    remedy: str


_GRADIENTS = (
    "use torch.no_grad(), torch.inference_mode() or torch.enable_grad() in a with statement"
)
_AUTOCAST = "use torch.autocast in a with statement"
_BACK = "set it back before the call returns"

#: In the order of `current_modes`.
MODES = (
    Mode(
        "the working folder",
        lambda torch, folder: os.chdir(folder),
        "write paths in full, or use contextlib.chdir in a with statement",
    ),
    Mode("torch's gradients", lambda torch, on: torch.set_grad_enabled(on), _GRADIENTS),
    Mode(
        "torch's autocast on the CPU",
        lambda torch, on: torch.set_autocast_enabled("cpu", on),
        _AUTOCAST,
    ),
    Mode(
        "torch's autocast on CUDA",
        lambda torch, on: torch.set_autocast_enabled("cuda", on),
        _AUTOCAST,
    ),
    Mode(
        "torch's default device",
        # None removes the default that the call has set, which leaves the CPU.
        lambda torch, device: torch.set_default_device(None if str(device) == "cpu" else device),
        "pass device=, or use torch.device in a with statement",
    ),
    Mode("torch's default dtype", lambda torch, dtype: torch.set_default_dtype(dtype), _BACK),
    Mode(
        "torch's float32 matmul precision",
        lambda torch, precision: torch.set_float32_matmul_precision(precision),
        _BACK,
    ),
    Mode(
        "torch's deterministic debug mode",
        lambda torch, mode: torch.set_deterministic_debug_mode(mode),
        _BACK,
    ),
    Mode("torch's number of threads", lambda torch, count: torch.set_num_threads(count), _BACK),
)


@beside_no_load()
def current_modes() -> tuple[object, ...]:
    """Return the value of each mode; only the working folder if torch is not loaded."""
    try:
        folder = _folder()
    except OSError:  # the folder was removed
        folder = None
    torch: Any = _modules.get("torch")
    if torch is None:
        return (folder,)
    try:
        return (
            folder,
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
            _device(torch),
            torch.get_default_dtype(),
            _precision(torch),
            torch.get_deterministic_debug_mode(),
            torch.get_num_threads(),
        )
    except AttributeError:  # another thread is loading torch
        return (folder,)


@beside_no_load()
def restore(before: tuple[object, ...]) -> str:
    """Set every mode to the value that `current_modes` returned before.

    Returns:
        The modes that had changed, each with its remedy; "" if none had.
    """
    torch, said = _modules.get("torch"), list[str]()
    # Not strict: the call may have loaded torch.
    for mode, old, new in zip(MODES, before, current_modes(), strict=False):
        if old == new:
            continue
        # A mode that cannot be restored, such as a removed folder, is named too.
        with suppress(Exception):
            mode.set(torch, old)
        value = ("off", "on")[new] if isinstance(new, bool) else f"at {new} instead of {old}"
        said.append(f"{mode.name} {value}; {mode.remedy}")
    return "; it left ".join(said)


def _device(torch: Any) -> object:  # noqa: ANN401 -- torch, which is not loaded here
    try:
        return torch.empty(0).device  # a third of the time of torch.get_default_device
    except Exception as error:  # this machine lacks the default device
        return f"one that does not work ({type(error).__name__})"


def _precision(torch: Any) -> object:  # noqa: ANN401 -- torch, which is not loaded here
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set through torch.backends; torch.get_* refuses to summarise it
        return "values of torch.backends"
