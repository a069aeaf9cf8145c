"""The memory of GPUs by name, and sizes such as 24GB."""

from __future__ import annotations

import re
from typing import NamedTuple

from evo_grpo.errors import ConfigError
from evo_grpo.schema.problems import nearest

#: GiB that CUDA reports on a card, rounded down; where error correction takes a part, without it.
GPUS = {
    "t4": 14.5,
    "v100-16gb": 15.7,
    "v100-32gb": 31.7,
    "rtx-3060": 11.6,
    "rtx-3090": 23.6,
    "rtx-4070": 11.6,
    "rtx-4080": 15.6,
    "rtx-4090": 23.5,
    "rtx-5090": 31.3,
    "rtx-a6000": 47.4,
    "rtx-6000-ada": 47.3,
    "a10": 22.0,
    "a10g": 22.0,
    "a30": 23.5,
    "a40": 44.4,
    "a100-40gb": 39.3,
    "a100-80gb": 79.1,
    "l4": 21.9,
    "l40": 44.3,
    "l40s": 44.3,
    "h100": 79.1,
    "h100-80gb": 79.1,
    "h200": 139.7,
    "b200": 178.0,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gb|gib|g)?")


class Gpu(NamedTuple):
    """A card.

    Attributes:
        name: The name as the user wrote it.
        bytes: Its memory.
    """

    name: str
    bytes: int


def parse_gpu(text: str) -> Gpu:
    """Return the card that a text names: `24GB` (10^9 bytes each), `24GiB` (2^30) or `a100-80gb`.

    Raises:
        ConfigError: The text is neither a size nor a known name.
    """
    plain = re.sub(r"[\s_]+", "-", text.strip().lower())
    known = plain.removeprefix("nvidia-").removeprefix("geforce-")
    if known in GPUS:
        return Gpu(text, int(GPUS[known] * 2**30))
    size = _SIZE.fullmatch(text.strip().lower())
    if size is not None and 0 < float(size[1]) < 1e5:
        return Gpu(text, int(float(size[1]) * (2**30 if size[2] == "gib" else 10**9)))
    close = nearest(known, GPUS)
    raise ConfigError(
        f"--gpu: expected a size such as 24GB, or one of {', '.join(GPUS)}; got {text!r}"
        + (f", did you mean {close}?" if close else "")
    )
