"""Distributes agents among shards, and shards among ranks.

A shard is a part of the population whose agents generate and learn in one batch. The composition of
a batch affects how sums are rounded, so the number of shards is fixed for a run, like its seed.
Ranks only compute shards, and any number of ranks gives the same result. With `engine.overlap`, a
shard is dealt into several batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

T = TypeVar("T")


def deal(agents: Sequence[T], shards: int) -> tuple[tuple[T, ...], ...]:
    """Distribute agents among S >= 1 shards: neighbours together, as evenly as possible.

    The first shards are larger; with fewer agents than shards, the last shards are empty.
    """
    least, more = divmod(len(agents), shards)
    ends = accumulate((least + (number < more) for number in range(shards)), initial=0)
    return tuple(tuple(agents[start:end]) for start, end in pairwise(ends))


def rank_of(shard: int, shards: int, ranks: int) -> int:
    """Return the rank that computes a shard: neighbours together, at least one shard per rank.

    There are at least as many shards as ranks.
    """
    return shard * ranks // shards


def batches(shards: Mapping[T, int], parts: int) -> list[tuple[T, ...]]:
    """Return agents, given the shard of each, by shard, and each shard dealt into parts."""
    by_shard: dict[int, list[T]] = {}
    for agent, shard in shards.items():
        by_shard.setdefault(shard, []).append(agent)
    dealt = (deal(by_shard[shard], parts) for shard in sorted(by_shard))
    return [part for own in dealt for part in own if part]
