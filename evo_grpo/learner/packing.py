"""Rows -> micro-batches under a token budget, in the order that computes the fewest tokens.

Rows of like length side by side save padding; rows of one prompt side by side share its tokens (see
`evo_grpo.model.forward.prefix`). Which saves more depends on the lengths of prompts and
completions, so both orders are packed, and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from evo_grpo.learner.rows import Row

#: Groups are cut where that leaves this share of the micro-batches at most: each costs a few
#: thousand operations more, but agents with as many rows as others serve plain batched matmuls.
CUT_SHARE = 2 / 3


@dataclass(frozen=True)
class _Item:
    """A row on its way into a bucket; lengths in tokens."""

    agent: int
    row: Row
    whole: int
    before: int
    prefix: tuple[int, bytes]

    @classmethod
    def of(cls, agent: int, row: Row) -> _Item:
        start = row.first_generated
        return cls(agent, row, len(row.token_ids), start, (agent, row.token_ids[:start].tobytes()))


#: Rows that had better stay together, and a round of them, one of each agent where there are any.
_Block: TypeAlias = list[_Item]
_Turn: TypeAlias = list[_Block]


@dataclass
class _Bucket:
    """A micro-batch while it is filled."""

    items: list[_Item] = field(default_factory=list[_Item])
    prefixes: set[tuple[int, bytes]] = field(default_factory=set[tuple[int, bytes]])
    whole: int = 0
    before: int = 0
    after: int = 0

    def add(self, item: _Item) -> None:
        self.items.append(item)
        self.prefixes.add(item.prefix)
        self.whole = max(self.whole, item.whole)
        self.before = max(self.before, item.before)
        self.after = max(self.after, item.whole - item.before)

    def tokens(self, more: Sequence[_Item] = ()) -> int:
        """Padded tokens to compute, with some more rows."""
        rows, prefixes = len(self.items) + len(more), len(self.prefixes)
        whole, before, after = self.whole, self.before, self.after
        if more:
            prefixes += len({item.prefix for item in more} - self.prefixes)
            whole = max(whole, *(item.whole for item in more))
            before = max(before, *(item.before for item in more))
            after = max(after, *(item.whole - item.before for item in more))
        return min(rows * whole, prefixes * before + rows * after)

    def takes(self, more: Sequence[_Item], token_budget: int, max_rows: int | None) -> bool:
        """Return whether rows fit in; an empty bucket takes any."""
        if not self.items:
            return True
        rows = len(self.items) + len(more)
        return (max_rows is None or rows <= max_rows) and self.tokens(more) <= token_budget


def pack(
    rows: Sequence[tuple[int, Row]], token_budget: int, max_rows: int | None = None
) -> list[list[tuple[int, Row]]]:
    """Split (agent, row) pairs into micro-batches.

    Buckets are about equal in tokens, and where rows allow it every agent has as many rows in one
    as in another: then plain batched matmuls serve them. Inside a bucket rows are sorted by agent.

    Args:
        rows: Pairs of agent position and row.
        token_budget: Padded tokens per micro-batch, a shared beginning counted once; one row at
            least.
        max_rows: Rows per micro-batch, None for no such bound.

    Returns:
        The buckets.
    """
    items = [_Item.of(agent, row) for agent, row in rows]
    if not items:
        return []
    packed = [_fill(_by_length(items), token_budget, max_rows)]
    if len({item.prefix for item in items}) < len(items):
        turns = _by_group(items)
        whole = _fill(turns, token_budget, max_rows)
        rows_alone = [[[item] for block in turn for item in block] for turn in turns]
        cut = _fill(rows_alone, token_budget, max_rows)
        packed.append(cut if len(cut) <= CUT_SHARE * len(whole) else whole)
    best = min(packed, key=lambda buckets: sum(bucket.tokens() for bucket in buckets))
    return [
        [(item.agent, item.row) for item in sorted(bucket.items, key=lambda item: item.agent)]
        for bucket in best
    ]


def _by_length(items: Sequence[_Item]) -> list[_Turn]:
    """Order rows by length, longest first; a turn is as many as there are agents."""
    # Among equals by number: neighbours in this order belong to different agents.
    ordered = sorted(items, key=lambda item: (-item.whole, item.row.number))
    size = len({item.agent for item in items})
    return [[[item] for item in ordered[i : i + size]] for i in range(0, len(ordered), size)]


def _by_group(items: Sequence[_Item]) -> list[_Turn]:
    """Put rows of one beginning side by side, longest first; a turn is a group of every agent."""
    groups: dict[tuple[int, bytes], _Block] = {}
    for item in items:
        groups.setdefault(item.prefix, []).append(item)
    turns: list[_Turn] = []
    taken: Counter[int] = Counter()
    for block in sorted(groups.values(), key=lambda block: -max(item.whole for item in block)):
        place = taken[block[0].agent]
        taken[block[0].agent] += 1
        if place == len(turns):
            turns.append([])
        turns[place].append(block)
    return [sorted(turn, key=lambda block: block[0].agent) for turn in turns]


def _fill(turns: Sequence[_Turn], token_budget: int, max_rows: int | None) -> list[_Bucket]:
    """Put as many whole turns into every bucket as its neighbours have.

    A turn that is over the budget is cut between blocks, a block between rows.
    """
    whole = _Bucket()
    lengths = 0
    for item in (item for turn in turns for block in turn for item in block):
        whole.add(item)
        lengths += item.whole
    # Rows in the order of their lengths need little padding; what is shared is counted once.
    pieces = max(1, -(-min(lengths, whole.tokens()) // token_budget))
    share = -(-len(turns) // pieces)
    if share * whole.tokens() > token_budget * len(turns):
        share = max(1, share - 1)
    buckets: list[_Bucket] = []
    left = 0
    for turn in turns:
        if not left:
            buckets.append(_Bucket())
            left = share
        left -= 1
        for block in turn:
            if not buckets[-1].takes(block, token_budget, max_rows):
                buckets.append(_Bucket())
                left = share - 1
            for item in block:
                if not buckets[-1].takes([item], token_budget, max_rows):
                    buckets.append(_Bucket())
                buckets[-1].add(item)
    return buckets
