"""Sizes of gymnasium spaces, which scripts written for AgileRL ask for."""

from __future__ import annotations

from typing import Any

import numpy as np

from evo_grpo.errors import ConfigError


def space_dim(space: Any) -> tuple[Any, ...]:  # noqa: ANN401 -- any gymnasium space, or TextSpace
    """Return the size of a gymnasium-like space.

    Args:
        space: Box (its shape), Discrete (n,), MultiDiscrete (its sizes, in one row), MultiBinary
            (n,) or its shape, Dict or Tuple (one entry per part), a list of spaces, or a text space
            (its vocabulary).

    Raises:
        ConfigError: For anything else.
    """
    parts = getattr(space, "spaces", space)
    if isinstance(parts, dict):
        return tuple(space_dim(part) for part in parts.values())
    if isinstance(parts, list | tuple):
        return tuple(space_dim(part) for part in parts)
    if hasattr(space, "vocab_size"):
        return (int(space.vocab_size),)
    if hasattr(space, "nvec"):
        return tuple(int(n) for n in np.ravel(space.nvec))
    if hasattr(space, "n"):
        return tuple(int(n) for n in np.ravel(space.n))
    if getattr(space, "shape", None) is not None:
        return tuple(space.shape)
    raise ConfigError(f"space: expected a gymnasium space or a text space, got {space!r}")
