"""Uniform draws by key: a number for (row key, step), independent of the other rows.

A counter-based generator (SplitMix64, Steele, Lea and Flood 2014) instead of a stateful one: the
draw of a row depends on its own key and step alone, so an agent's samples are the same alone and
among thirty others, and after rows left.
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
    """Return the draws of rows (B,) for some steps of their completions, from token `first` on.

    Returns:
        (steps, B) float64 in [0, 1), multiples of 2**-53. A draw depends on its row's key and its
        position alone.
    """
    moves = [_signed((step + 1) * _GAMMA % (1 << 64)) for step in range(first, first + steps)]
    z = keys + torch.tensor(moves, dtype=torch.int64, device=keys.device)[:, None]
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    z = z ^ _shift(z, 31)
    return _shift(z, 11).to(torch.float64) * 2.0**-53


def _shift(value: Tensor, bits: int) -> Tensor:
    """Shift right logically; torch's own >> on int64 carries the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
