"""Which agents are computed together, and on which rank.

A shard is a part of the population that generates and learns in batches of its own. The composition
of a batch decides how sums are rounded, so the number of shards is fixed for a run, like its seed.
Ranks only compute shards, and any number of ranks gives the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

T = TypeVar("T")


def deal(agents: Sequence[T], shards: int) -> tuple[tuple[T, ...], ...]:
    """Deal agents to S >= 1 shards: neighbours together, as evenly as possible.

    The first shards are larger; the last ones are empty where there are fewer agents.
    """
    least, more = divmod(len(agents), shards)
    ends = accumulate((least + (number < more) for number in range(shards)), initial=0)
    return tuple(tuple(agents[start:end]) for start, end in pairwise(ends))


def rank_of(shard: int, shards: int, ranks: int) -> int:
    """Return the rank that computes a shard: neighbours together, each rank at least one.

    There are at least as many shards as ranks.
    """
    return shard * ranks // shards
