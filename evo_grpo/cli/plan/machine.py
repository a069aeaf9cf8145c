"""What a plan says of the device that a run asks for; the driver is asked, torch is not loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence


def missing_device(device: str, cuda: Sequence[int | None] | None) -> Iterator[str]:
    """Yield a warning where this machine lacks the device of a run.

    Args:
        device: The setting `engine.device`.
        cuda: The CUDA devices of this machine, as `sizing.planning.cuda_devices` returns them.
    """
    remedy = "a run will be refused here; set auto or cpu, or run it where there is one"
    if device == "mps" and sys.platform != "darwin":
        yield f"engine.device is mps, which only a Mac has: {remedy}"
    if not device.startswith("cuda") or cuda is None:
        return
    number = int(device.partition(":")[2] or 0)
    if not cuda:
        yield f"engine.device is {device}, and this machine shows no CUDA device: {remedy}"
    elif number >= len(cuda):
        last = f"cuda:{len(cuda) - 1}"
        yield f"engine.device is {device}, and the last CUDA device here is {last}: {remedy}"
