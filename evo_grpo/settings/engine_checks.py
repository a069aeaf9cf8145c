"""Checks among the settings of the group `engine`."""

from __future__ import annotations

from collections.abc import Iterator

from evo_grpo.schema.problems import Problem
from evo_grpo.settings.engine import ENGINES, EngineConfig

LEAST_PARTS = 3
"""Fewest parts of a population some of which are in host memory with `offload_adapters`."""


def engine_problems(engine: EngineConfig) -> Iterator[Problem]:
    """Yield settings of the engine that cannot be combined, with their paths in the group."""
    yield from _zero(engine)
    yield from _offload(engine)


def _zero(engine: EngineConfig) -> Iterator[Problem]:
    """Yield settings that cannot be combined with DeepSpeed."""
    if engine.zero is None:
        return
    if engine.dtype == "float16":
        yield Problem(
            ("dtype",),
            f"expected auto, bfloat16 or float32 with zero {engine.zero}, got float16, whose "
            "gradients need a loss scale, which is not supported with DeepSpeed; use bfloat16",
        )
    if engine.base == "sharded":
        yield Problem(
            ("base",),
            f"expected replicated with zero {engine.zero}, got sharded; zero 3 divides the base "
            "too, or set zero to null",
        )
    if (engine.shards or 1) > 1:
        yield Problem(
            ("shards",),
            f"expected null or 1 with zero {engine.zero}, where all processes train each agent "
            f"together, got {engine.shards}; leave it out, or set zero to null",
        )
    if engine.overlap:
        yield Problem(
            ("overlap",),
            f"expected false with zero {engine.zero}, which trains one agent after the other, got "
            f"{str(engine.overlap).lower()}; leave it out, or set zero to null",
        )
    if not engine.rollout_settings.shares_base:
        fitting = " or ".join(name for name, kind in ENGINES.items() if kind.shares_base)
        yield Problem(
            ("rollout",),
            f"expected {fitting} with zero {engine.zero}, got {engine.rollout}; set zero to null",
        )
    if engine.compile is not None:
        yield Problem(
            ("compile",),
            f"expected null with zero {engine.zero}, whose hooks are not compiled, got "
            f"{engine.compile!r}; leave it out",
        )


def _offload(engine: EngineConfig) -> Iterator[Problem]:
    """Yield a problem if no agent could be in host memory."""
    if not engine.offload_adapters:
        return
    if engine.zero is not None:
        yield Problem(
            ("offload_adapters",),
            f"expected false with zero {engine.zero}, whose engine holds the moments itself, got "
            "true; leave it out, or set zero to null",
        )
    elif engine.parts() < LEAST_PARTS:
        yield Problem(
            ("offload_adapters",),
            f"expected false with fewer than {LEAST_PARTS} parts of the population, of which one "
            f"computes and the next is fetched, got true with {engine.parts()}; set engine.shards "
            f"to {LEAST_PARTS} or more, or leave it out",
        )
