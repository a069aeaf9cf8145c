"""Uniform draws by key: one number per (row key, step), independent of the other rows.

The generator is counter-based (SplitMix64, Steele, Lea and Flood 2014) instead of stateful. The
draw of a row depends only on its key and step, so an agent's samples do not change with the number
of other agents in the batch, nor when rows leave it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def key_tensor(keys: Sequence[int], device: torch.device) -> Tensor:
    """Return row keys in [0, 2**63) as (B,) int64."""
    return torch.tensor(list(keys), dtype=torch.int64, device=device)


def uniform(keys: Tensor, first: int, steps: int) -> Tensor:
    """Return the draws of rows with keys (B,) for `steps` tokens, starting at token `first`.

    Returns:
        (steps, B) float64 in [0, 1), multiples of 2**-53. A draw depends only on its row's key and
        its position.
    """
    moves = [_signed((step + 1) * _GAMMA % (1 << 64)) for step in range(first, first + steps)]
    z = keys + torch.tensor(moves, dtype=torch.int64, device=keys.device)[:, None]
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    z = z ^ _shift(z, 31)
    return _shift(z, 11).to(torch.float64) * 2.0**-53


def _shift(value: Tensor, bits: int) -> Tensor:
    """Shift right logically; torch's >> on int64 copies the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
