"""Distributes agents among shards, and orders the transfers between ranks.

A shard is a part of the population whose agents generate and learn in one batch. The batch affects
how sums are rounded, so the number of shards is fixed for a run, like its seed, and any number of
ranks gives the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


def side_by_side(transfers: Iterable[T], ends: Callable[[T], tuple[int, int]]) -> list[T]:
    """Return transfers between ranks in an order in which many run at the same time.

    All ranks go through the transfers in this order, and wait in each of their own for the other
    rank. So transfers are divided into consecutive groups in which no rank has two; each joins the
    earliest group with room. `ends` returns the two ranks of a transfer; a transfer within a rank
    never waits.
    """
    groups: list[set[int]] = []
    dealt: list[tuple[int, T]] = []
    for transfer in transfers:
        busy = set(ends(transfer))
        if len(busy) == 1:
            busy = set[int]()
        number = next((n for n, group in enumerate(groups) if not group & busy), len(groups))
        if number == len(groups):
            groups.append(set())
        groups[number] |= busy
        dealt.append((number, transfer))
    return [transfer for _, transfer in sorted(dealt, key=lambda one: one[0])]
