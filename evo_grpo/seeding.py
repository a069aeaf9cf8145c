"""Derives independent random streams, one per (purpose, round, member, ...), from one seed.

The seed of a stream is a hash of the run's seed and a path of names and numbers that identifies
the purpose of the stream. A new stream therefore never changes the draws of another one.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_MASK_63 = (1 << 63) - 1


def derive(seed: int, *path: str | int) -> int:
    """Hash a seed and a path into a new seed.

    Args:
        seed: The parent seed, any int.
        *path: Names and numbers that identify the stream, e.g. `("sample", round, agent)`.

    Returns:
        An int in [0, 2**63), the same on every machine and in every process.
    """
    text = "\x1f".join([str(int(seed)), *(f"{type(part).__name__[0]}:{part}" for part in path)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") & _MASK_63


def generator(seed: int, *path: str | int) -> np.random.Generator:
    """Return a numpy generator for the stream `derive(seed, *path)`."""
    # Imported here because numpy is slow to load and `evo-grpo check` draws nothing.
    import numpy as np

    return np.random.default_rng(derive(seed, *path))
