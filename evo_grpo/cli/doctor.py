"""Describes an installation: versions, devices, memory, extras, and problems with them.

The description can be pasted into an issue: it has no paths, no host name, and only the environment
variables that choose devices, threads and offline modes.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata

from evo_grpo.errors import ModelError
from evo_grpo.sources import PACKAGED, embedded_models, fetched, installed
from evo_grpo.training.sizing.cards import torch_build, unseen_gpus
from evo_grpo.training.sizing.machine import format_bytes, machine_memory

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
_REQUIREMENT = re.compile(
    r"(?P<package>[\w.-]+)(?:\[[^\]]*\])?\s*(?:>=(?P<least>[\w.]+))?"
    r"(?:\s*;\s*extra == ['\"](?P<extra>[\w-]+)['\"])?"
)


@dataclass(frozen=True)
class Requirement:
    """A package that the library, or one of its extras, needs.

    Attributes:
        least: The least version; empty for any.
        extra: The extra that needs the package; empty for the library itself.
        found: The installed version; None if the package is missing.
    """

    package: str
    least: str
    extra: str
    found: str | None

    @property
    def is_old(self) -> bool:
        """Whether the installed version is below the least one."""
        return self.found is not None and _numbers(self.found) < _numbers(self.least)

    def __str__(self) -> str:
        return f"{self.package} {self.found or 'missing'}"


@dataclass
class Findings:
    """The description of an installation: titled lines, and warnings with remedies."""

    lines: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    warnings: list[str] = field(default_factory=list[str])


def examine() -> Findings:
    """Return the description of this installation; loads torch."""
    found = Findings()
    needed = list(requirements())
    found.lines += [
        ("evo-grpo", _version(NAME) or "not installed: a source tree"),
        ("python", f"{platform.python_version()}, {platform.platform()}"),
        ("processors", _processors()),
        ("memory", _memory()),
    ]
    _torch(found)
    own = [one for one in needed if not one.extra]
    found.lines.append(("packages", ", ".join(map(str, own)) or "unknown"))
    found.lines += _extras(needed)
    found.lines += [("models", _models()), ("environment", _environment(os.environ))]
    found.warnings += [
        f"{one.package} {one.found} is below {one.least}, which {NAME} needs: "
        f'pip install -U "{one.package}>={one.least}"'
        for one in needed
        if one.is_old and one.extra not in FOR_CONTRIBUTORS
    ]
    found.warnings += [
        f'{one.package} is missing: pip install "{one.package}>={one.least}"'
        for one in own
        if one.found is None
    ]
    return found


def requirements() -> Iterator[Requirement]:
    """Yield the requirements in the metadata of the package; none in a bare source tree."""
    try:
        listed = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:
        return
    for line in listed:
        if (match := _REQUIREMENT.match(line)) is not None:
            package = match["package"]
            yield Requirement(
                package, match["least"] or "", match["extra"] or "", _version(package)
            )


def _torch(found: Findings) -> None:
    """Add torch, its build, and the devices that it sees."""
    try:
        import torch
    except Exception as error:  # a broken build raises errors of any kind
        found.lines.append(("torch", f"cannot be imported: {error}"))
        found.warnings.append("torch cannot be imported: see docs/install.md for the right build")
        return
    build = torch_build(torch.version)
    found.lines.append(("torch", f"{torch.__version__}, built for {build}"))
    devices = [_device(number) for number in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    found.lines.append(("devices", "; ".join(devices) or "no GPU"))
    if not devices and (unseen := unseen_gpus(build)) is not None:
        found.warnings.append(unseen)


def _device(number: int) -> str:
    import torch

    own = torch.cuda.get_device_properties(number)
    bf16 = "" if own.major >= 8 else ", emulates bfloat16: engine.dtype auto is float16"
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
    """Yield a line with the installed extras, and one with the others."""
    extras: dict[str, list[Requirement]] = {}
    for one in needed:
        if one.extra and one.extra not in FOR_CONTRIBUTORS:
            extras.setdefault(one.extra, []).append(one)
    have = {name: own for name, own in extras.items() if all(one.found for one in own)}
    shown = (f"{name} ({', '.join(map(str, own))})" for name, own in have.items())
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


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first numbers of a version: (2, 13, 0) for "2.13.0+cpu"."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
