"""Copies many arrays to a device, or many tensors to the host, in one transfer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def send(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays to a device in one transfer: float32 as fp32, integers and booleans as int64.

    On CUDA the host does not wait for the transfer.
    """
    floats = [array.dtype == np.float32 for array in arrays]
    bits = [a.view(np.int32) if is_float else a for a, is_float in zip(arrays, floats, strict=True)]
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in bits], dtype=np.int64))
    # Pinned memory is kept until it has been copied, which other devices do not promise.
    pinned = device.type == "cuda"
    flat = flat.pin_memory() if pinned else flat
    parts = flat.to(device, non_blocking=pinned).split([array.size for array in arrays])
    return [
        (part.int().view(torch.float32) if is_float else part).view(array.shape)
        for part, array, is_float in zip(parts, arrays, floats, strict=True)
    ]


def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors on the CPU, which share one buffer for each device and dtype.

    The host waits once per buffer instead of once per tensor.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(index)
    copies: dict[int, Tensor] = {}
    for indices in alike.values():
        sources = [tensors[index].detach() for index in indices]
        buffer = torch.cat([tensor.reshape(-1) for tensor in sources]).cpu()
        parts = buffer.split([tensor.numel() for tensor in sources])
        copies |= {i: p.view(t.shape) for i, p, t in zip(indices, parts, sources, strict=True)}
    return [copies[index] for index in range(len(tensors))]
