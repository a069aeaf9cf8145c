"""The working folder and torch's modes, which a call of the user's code must leave as they were.

The run reads its files and computes by them, so a call that changes one changes the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

_modules = sys.modules
_folder = os.getcwd


class Mode(NamedTuple):
    """One of the modes that `look` reads: its name, what sets it, how to change it for a while."""

    name: str
    put_back: Callable[[Any, Any], object]
    remedy: str


_GRADIENTS = (
    "use torch.no_grad(), torch.inference_mode() or torch.enable_grad() in a with statement"
)
_AUTOCAST = "use torch.autocast in a with statement"
_BACK = "set it back before the call returns"

#: In the order of `look`.
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
        # None takes back a default of the call's own; the CPU is what is left then.
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


def look() -> tuple[object, ...]:
    """Return the value of each mode; of the working folder alone where nothing has loaded torch."""
    try:
        folder = _folder()
    except OSError:  # it was removed
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
    except AttributeError:  # a second thread is in the middle of loading torch
        return (folder,)


def put_back(before: tuple[object, ...]) -> str:
    """Give every mode the value that `look` returned before.

    Returns:
        What had another value, in words, with the remedy; empty where nothing had.
    """
    torch, said = _modules.get("torch"), list[str]()
    for mode, old, new in zip(MODES, before, look(), strict=False):  # torch may be loaded by now
        if old == new:
            continue
        # What cannot be put back, such as a folder that was removed, is named all the same.
        with suppress(Exception):
            mode.put_back(torch, old)
        value = ("off", "on")[new] if isinstance(new, bool) else f"at {new} instead of {old}"
        said.append(f"{mode.name} {value}; {mode.remedy}")
    return "; it left ".join(said)


def _device(torch: Any) -> object:  # noqa: ANN401 -- torch, which is not loaded here
    try:
        return torch.empty(0).device  # a third of the time of torch.get_default_device
    except Exception as error:  # a default device that this machine does not have
        return f"one that does not work ({type(error).__name__})"


def _precision(torch: Any) -> object:  # noqa: ANN401 -- torch, which is not loaded here
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set by torch.backends, which torch.get_* then refuses to summarise
        return "values of torch.backends"
