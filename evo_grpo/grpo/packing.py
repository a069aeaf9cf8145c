"""Rows -> micro-batches under a token budget, in the order that computes the fewest tokens.

Rows of like length side by side save padding; rows of one prompt side by side share its tokens (see
`evo_grpo.model.prefixes`). Which saves more depends on the lengths of prompts and completions, so
both orders are packed, and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from evo_grpo.grpo.batch import Row


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

    def tokens(self, item: _Item | None = None) -> int:
        """Padded tokens to compute, with one more row."""
        rows, prefixes = len(self.items), len(self.prefixes)
        whole, before, after = self.whole, self.before, self.after
        if item is not None:
            rows, prefixes = rows + 1, prefixes + (item.prefix not in self.prefixes)
            whole, before = max(whole, item.whole), max(before, item.before)
            after = max(after, item.whole - item.before)
        return min(rows * whole, prefixes * before + rows * after)


def pack(
    rows: Sequence[tuple[int, Row]], token_budget: int, max_rows: int | None = None
) -> list[list[tuple[int, Row]]]:
    """Split (agent, row) pairs into micro-batches.

    Buckets are about equal in rows, and where rows allow it every agent has as many in one as
    another has: then plain batched matmuls serve them. Inside a bucket rows are sorted by agent.

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
    # Among equals by number: neighbours in this order belong to different agents.
    by_length = sorted(items, key=lambda item: (-item.whole, item.row.number))
    packed = [_fill(by_length, 1, token_budget, max_rows)]
    group = max(Counter(item.prefix for item in items).values())
    if group > 1:
        packed.append(_fill(_by_group(items), group, token_budget, max_rows))
    best = min(packed, key=lambda buckets: sum(bucket.tokens() for bucket in buckets))
    return [
        [(item.agent, item.row) for item in sorted(bucket.items, key=lambda item: item.agent)]
        for bucket in best
    ]


def _by_group(items: Sequence[_Item]) -> list[_Item]:
    """Put rows of one beginning side by side, longest first, the agents' groups in turns."""
    longest: dict[tuple[int, bytes], int] = {}
    for item in items:
        longest[item.prefix] = max(longest.get(item.prefix, 0), item.whole)
    place: dict[tuple[int, bytes], int] = {}
    taken: Counter[int] = Counter()
    for prefix in sorted(longest, key=lambda prefix: -longest[prefix]):
        place[prefix] = taken[prefix[0]]
        taken[prefix[0]] += 1
    return sorted(items, key=lambda item: (place[item.prefix], item.agent, item.row.number))


def _fill(
    ordered: Sequence[_Item], group: int, token_budget: int, max_rows: int | None
) -> list[_Bucket]:
    """Cut rows in this order into buckets of `group` rows of every agent, or a multiple."""
    unit = len({item.agent for item in ordered}) * group
    whole = _Bucket()
    for item in ordered:
        whole.add(item)
    each = whole.tokens() / len(ordered)
    # As many pieces as the tokens need without padding, each a whole number of units.
    lengths = sum(item.whole for item in ordered) if group == 1 else each * len(ordered)
    share = -(-len(ordered) // max(1, -(-int(lengths) // token_budget)))
    limit = -(-share // unit) * unit
    if limit * each > token_budget:
        limit = max(unit, limit - unit)
    limit = min(limit, max_rows or limit)
    buckets: list[_Bucket] = []
    for item in ordered:
        full = not buckets or len(buckets[-1].items) >= limit
        if full or buckets[-1].tokens(item) > token_budget:
            buckets.append(_Bucket())
        buckets[-1].add(item)
    return buckets
