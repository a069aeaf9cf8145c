"""The GPUs of this machine, and a table of cards with their memory and their rates."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Any, NamedTuple

from evo_grpo.errors import ConfigError
from evo_grpo.schema.problems import nearest

#: Share of a data sheet's rates that cards reach, where they were not measured.
REACHED = 0.8


class Card(NamedTuple):
    """The memory and the rates of a type of GPU.

    Attributes:
        gib: GiB that CUDA reports, rounded down; memory taken by error correction is not included.
        tflops: TFLOP/s of a large product in half precision, with sums in float32.
        read: TB/s (10^12 bytes) that can be read.
        copy: TB/s that a copy reads and writes, summed.
        measured: When and with what the rates were measured; empty if they are `REACHED` times
            those of the data sheet.
    """

    gib: float
    tflops: float
    read: float
    copy: float
    measured: str = ""

    @classmethod
    def of(cls, gib: float, tflops: float, bandwidth: float) -> Card:
        """Derive a card from its data sheet: dense TFLOP/s in half precision, TB/s of memory."""
        rate = REACHED * bandwidth
        return cls(gib, REACHED * tflops, rate, rate)


#: `experiments/bench/gpu.py` measures a row on any card.
CARDS = {
    "t4": Card.of(14.5, 65, 0.32),
    "v100-16gb": Card.of(15.7, 125, 0.9),
    "v100-32gb": Card.of(31.7, 125, 0.9),
    "rtx-3060": Card.of(11.6, 25, 0.36),
    "rtx-3090": Card.of(23.6, 71, 0.936),
    "rtx-4070": Card.of(11.6, 58, 0.504),
    "rtx-4080": Card.of(15.6, 97, 0.717),
    "rtx-4090": Card.of(23.5, 165, 1.01),
    "rtx-5090": Card.of(31.3, 209, 1.79),
    "rtx-a6000": Card.of(47.4, 155, 0.768),
    "rtx-6000-ada": Card.of(47.3, 364, 0.96),
    "a10": Card.of(22.0, 125, 0.6),
    "a10g": Card.of(22.0, 70, 0.6),
    "a30": Card.of(23.5, 165, 0.933),
    "a40": Card.of(44.4, 150, 0.696),
    "a100-40gb": Card.of(39.3, 312, 1.56),
    "a100-80gb": Card.of(79.1, 312, 2.04),
    "l4": Card.of(21.9, 121, 0.3),
    "l40": Card.of(44.3, 181, 0.864),
    "l40s": Card.of(44.3, 362, 0.864),
    "h100": Card.of(79.1, 989, 3.35),
    "h100-80gb": Card.of(79.1, 989, 3.35),
    "h100-pcie": Card.of(79.1, 756, 2.0),
    "h200": Card(139.7, 785, 2.71, 3.98, "2026-11-28, PyTorch 2.11.0"),
    "b200": Card.of(178.0, 2250, 8.0),
}
#: Cards of a compute capability below 8.0, which emulate bfloat16.
OLDER = ("t4", "v100")
#: Words that make the name of another card; "24q" names a share of a card's memory.
_OTHERS = {"laptop", "ti", "super", "d", "nvl", "max"}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gb|gib|g)?")


class Gpu(NamedTuple):
    """A GPU: its name as the user or the driver wrote it, and its bytes of memory."""

    name: str
    bytes: int

    @property
    def card(self) -> Card | None:
        """The GPU's entry in `CARDS`; None if the table lacks this type of GPU."""
        words = set(_plain(self.name).split("-"))
        matching = [name for name in CARDS if words.issuperset(name.split("-"))]
        if not matching or words & _OTHERS or any(re.fullmatch(r"\d+q", word) for word in words):
            return None
        return CARDS[max(matching, key=len)]

    @property
    def older(self) -> bool:
        """Whether the GPU uses float16 as half precision; see `model.loading.pick_dtype`."""
        return _plain(self.name).startswith(OLDER)


def parse_gpu(text: str) -> Gpu:
    """Return the GPU that a text describes, for instance "24GB", "24GiB" or "a100-80gb".

    A GB has 10^9 bytes, a GiB 2^30. Raises ConfigError if the text is no size and no known name.
    """
    name = _plain(text)
    if name in CARDS:
        return Gpu(text, int(CARDS[name].gib * 2**30))
    size = _SIZE.fullmatch(text.strip().lower())
    if size is not None and 0 < float(size[1]) < 1e5:
        return Gpu(text, int(float(size[1]) * (2**30 if size[2] == "gib" else 10**9)))
    close = nearest(name, CARDS)
    raise ConfigError(
        f"--gpu: expected a size such as 24GB, or one of {', '.join(CARDS)}; got {text!r}"
        + (f", did you mean {close}?" if close else "")
    )


def _plain(text: str) -> str:
    plain = re.sub(r"[\s_]+", "-", text.strip().lower())
    return re.sub(r"^(nvidia-|geforce-|tesla-)+", "", plain)


def cuda_devices() -> list[Gpu | None]:
    """Return this process's CUDA devices from nvidia-smi; a device of unknown memory is None."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        answer = subprocess.run(
            [tool, "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):  # nvidia-smi does not start, or hangs
        return []
    if answer.returncode != 0:  # no device, or no driver
        return []
    lines = [line.partition(",") for line in answer.stdout.splitlines() if line.strip()]
    return _visible(
        [
            Gpu(name.strip(), int(size) << 20) if size.strip().isdigit() else None
            for size, _, name in lines
        ]
    )


def torch_build(version: Any) -> str:  # noqa: ANN401 -- the module torch.version
    """Return the devices that a build of torch is for: "CPUs", "CUDA 13.0" or "ROCm 7.1"."""
    hip, cuda = getattr(version, "hip", None), version.cuda
    return f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "CPUs"


def unseen_gpus(build: str) -> str | None:
    """Return why torch sees no GPU, with a remedy; None if nvidia-smi lists no GPU either."""
    visible = cuda_devices()
    if not visible:
        return None
    gpus = "a GPU" if len(visible) == 1 else f"{len(visible)} GPUs"
    remedy = (
        "install torch's build for CUDA (pytorch.org, or docs/install.md)"
        if not build.startswith("CUDA")
        else "the driver may be too old for it; update the driver, or install torch's build for an "
        "older CUDA"
    )
    return f"nvidia-smi lists {gpus}, and torch, built for {build}, sees none: {remedy}"


def _visible(devices: list[Gpu | None]) -> list[Gpu | None]:
    """Return the devices that CUDA_VISIBLE_DEVICES selects; nvidia-smi also lists all others."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return devices
    visible: list[Gpu | None] = []
    for name in map(str.strip, setting.split(",")):
        if name.startswith(("GPU-", "MIG-")):
            visible.append(None)
        elif name.isdigit() and int(name) < len(devices):
            visible.append(devices[int(name)])
        else:  # CUDA ignores all further entries
            break
    return visible
