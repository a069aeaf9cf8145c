"""Describes an installation: versions, devices, memory, extras, and what is wrong with them.

The description is made to be pasted into an issue. It has no paths, no host name, and of
environment variables only the values of those that choose devices, threads and offline modes.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata

from packaging.requirements import Requirement

from evo_grpo.errors import ModelError
from evo_grpo.sources import PACKAGED, embedded_models, fetched, installed
from evo_grpo.training.sizing.machine import (
    format_bytes,
    machine_memory,
    torch_build,
    unseen_gpus,
)

NAME = "evo-grpo"
FOR_CONTRIBUTORS = ("browser", "dev", "docs", "test")
"""Extras that no feature of the library needs."""
VALUES = (
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    *("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "PYTORCH_CUDA_ALLOC_CONF"),
)
"""Environment variables whose values are shown."""
NAMES = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_TOKEN", "EVO_GRPO_CACHE")
"""Environment variables of which only the name is shown: their values are paths and secrets."""


def examine() -> tuple[list[tuple[str, str]], list[str]]:
    """Return the description of this installation, as titles with texts, and what is wrong with it.

    Loads torch.
    """
    needed, warnings = requirements(), list[str]()
    lines = [
        ("evo-grpo", _version(NAME) or "not installed: a source tree"),
        ("python", f"{platform.python_version()}, {platform.platform()}"),
        ("processors", _processors()),
        ("memory", _memory()),
    ]
    lines += _torch(warnings)
    own = [one for one in needed if not _extra_of(one)]
    lines.append(("packages", _listed(own) or "unknown"))
    lines += _extras(needed)
    lines += [("models", _models()), ("environment", _environment(os.environ))]
    for one in needed:
        version, extra = _version(one.name), _extra_of(one)
        if extra in FOR_CONTRIBUTORS or (extra and version is None):
            continue
        if version is None or not one.specifier.contains(version, prereleases=True):
            warnings.append(
                f"{one.name} is {version or 'missing'}, and {NAME} needs {one.specifier}: "
                f'pip install -U "{one.name}{one.specifier}"'
            )
    return lines, warnings


def requirements() -> list[Requirement]:
    """Return the requirements in the metadata of the package; none in a bare source tree."""
    try:
        return [Requirement(line) for line in metadata.requires(NAME) or []]
    except metadata.PackageNotFoundError:
        return []


def _extra_of(one: Requirement) -> str:
    """Return the extra that needs a package; empty for the library itself."""
    found = re.search(r"extra == \W([\w-]+)", str(one.marker or ""))
    return "" if found is None else found[1]


def _listed(needed: list[Requirement]) -> str:
    return ", ".join(f"{one.name} {_version(one.name) or 'missing'}" for one in needed)


def _torch(warnings: list[str]) -> Iterator[tuple[str, str]]:
    """Yield torch with its build, and the devices that it sees; add what is wrong with it."""
    try:
        import torch
    except Exception as error:  # a broken build raises errors of any kind
        yield "torch", f"cannot be imported: {error}"
        warnings.append("torch cannot be imported: see docs/install.md for the right build")
        return
    build = torch_build(torch.version)
    yield "torch", f"{torch.__version__}, built for {build}"
    devices = [_device(number) for number in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    yield "devices", "; ".join(devices) or "no GPU"
    if not devices and (unseen := unseen_gpus(build)) is not None:
        warnings.append(unseen)


def _device(number: int) -> str:
    import torch

    own = torch.cuda.get_device_properties(number)
    bf16 = "" if own.major >= 8 else ", no bfloat16: set engine.dtype to float16 or float32"
    size = format_bytes(own.total_memory)
    return f"cuda:{number} {own.name}, {size}, capability {own.major}.{own.minor}{bf16}"


def _processors() -> str:
    count = os.cpu_count() or 0
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else count
    return f"{usable} of {count}" if usable != count else str(count)


def _memory() -> str:
    size = machine_memory()
    return "unknown" if size is None else f"{format_bytes(size)} of this machine or container"


def _extras(needed: list[Requirement]) -> Iterator[tuple[str, str]]:
    """Yield a line with the extras that are installed, and one with those that are not."""
    extras: dict[str, list[Requirement]] = {}
    for one in needed:
        if (extra := _extra_of(one)) and extra not in FOR_CONTRIBUTORS:
            extras.setdefault(extra, []).append(one)
    have = {name: own for name, own in extras.items() if all(_version(one.name) for one in own)}
    shown = (f"{name} ({_listed(own)})" for name, own in have.items())
    yield "extras", ", ".join(shown) or "none"
    if missing := [name for name in extras if name not in have]:
        yield "not installed", ", ".join(missing)


def _models() -> str:
    found = [f"{name} (embedded)" for name in embedded_models()]
    for name in PACKAGED:
        try:
            there = installed(name) is not None or fetched(name).is_file()
        except ModelError as error:  # no folder for models is known
            found.append(f"{name} ({error})")
            continue
        found.append(f"{name} ({'there' if there else f'not fetched: evo-grpo fetch {name}'})")
    return ", ".join(found)


def _environment(variables: Mapping[str, str]) -> str:
    values = [f"{name}={variables[name]}" for name in VALUES if name in variables]
    names = [f"{name} is set" for name in NAMES if name in variables]
    virtual = ["a virtual environment" if sys.prefix != sys.base_prefix else "the system's Python"]
    return ", ".join([*virtual, *values, *names])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
