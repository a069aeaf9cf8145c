"""Divides rows into minibatches, and these into micro-batches under a token budget.

Rows in order of length need less padding; rows in order of prompt compute the tokens of a prompt
once (see `evo_grpo.model.forward.prefix`). Which order saves more depends on the lengths of prompts
and completions, so both orders are tried and the one with fewer tokens is used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from evo_grpo.learn.objective.shaping import token_advantages
from evo_grpo.learn.rows import Row
from evo_grpo.schema.hparams import Hparams
from evo_grpo.seeding import generator
from evo_grpo.settings.algorithm import AlgorithmConfig

#: Groups are split only if that leaves at most this share of the micro-batches: each micro-batch
#: costs a few thousand operations, but equal row counts run as plain batched matmuls.
MAX_SPLIT_SHARE = 2 / 3
#: What a micro-batch costs beside its tokens, as a share of the token budget.
BUCKET_SHARE = 1 / 16
#: Most places where rows are cut into micro-batches.
MOST_CUTS = 128


@dataclass(frozen=True)
class _SizedRow:
    """A row with the numbers by which it is packed.

    `position` is the index of the row's agent in the learn call. `prefix_length` is the number of
    tokens before the first generated one. Rows with equal `prefix`, which is `position` and these
    tokens, can share the prefix.
    """

    position: int
    row: Row
    length: int
    prefix_length: int
    prefix: tuple[int, bytes]

    @classmethod
    def of(cls, position: int, row: Row) -> _SizedRow:
        start = row.first_generated
        prefix = (position, row.token_ids[:start].tobytes())
        return cls(position, row, len(row.token_ids), start, prefix)


#: Rows to keep together if the budget allows: one row, or a group with a common prefix.
_Block: TypeAlias = list[_SizedRow]
#: One block of each agent that has blocks left: a micro-batch of whole tiers is balanced.
_Tier: TypeAlias = list[_Block]


@dataclass
class _Bucket:
    """A micro-batch under construction, with the largest lengths of its rows."""

    rows: list[_SizedRow] = field(default_factory=list[_SizedRow])
    count: int = 0
    prefixes: set[tuple[int, bytes]] = field(default_factory=set[tuple[int, bytes]])
    length: int = 0
    prefix_length: int = 0
    rest_length: int = 0

    @classmethod
    def of(cls, rows: Iterable[_SizedRow]) -> _Bucket:
        bucket = cls()
        for row in rows:
            bucket.add(row)
        return bucket

    def merge(self, other: _Bucket) -> None:
        """Count the rows of another bucket, without listing them."""
        self.count += other.count
        self.prefixes |= other.prefixes
        self.length = max(self.length, other.length)
        self.prefix_length = max(self.prefix_length, other.prefix_length)
        self.rest_length = max(self.rest_length, other.rest_length)

    def add(self, row: _SizedRow) -> None:
        self.rows.append(row)
        self.count += 1
        self.prefixes.add(row.prefix)
        self.length = max(self.length, row.length)
        self.prefix_length = max(self.prefix_length, row.prefix_length)
        self.rest_length = max(self.rest_length, row.length - row.prefix_length)

    def tokens(self, added: Sequence[_SizedRow] = ()) -> int:
        """Return the number of padded tokens with `added` rows; prefixes are shared if cheaper."""
        rows, prefixes = self.count + len(added), len(self.prefixes)
        length, before, after = self.length, self.prefix_length, self.rest_length
        if added:
            prefixes += len({row.prefix for row in added} - self.prefixes)
            length = max(length, *(row.length for row in added))
            before = max(before, *(row.prefix_length for row in added))
            after = max(after, *(row.length - row.prefix_length for row in added))
        return min(rows * length, prefixes * before + rows * after)

    def fits(self, added: Sequence[_SizedRow], token_budget: int, max_rows: int | None) -> bool:
        """Return whether the bucket can take the rows `added`; an empty bucket takes any rows."""
        if not self.rows:
            return True
        rows = len(self.rows) + len(added)
        return (max_rows is None or rows <= max_rows) and self.tokens(added) <= token_budget


def pack(
    rows: Sequence[tuple[int, Row]], token_budget: int, max_rows: int | None = None
) -> list[list[tuple[int, Row]]]:
    """Split (position of its agent, row) pairs into micro-batches, each sorted by agent.

    Micro-batches have little padding and, if possible, the same number of rows of each agent, for
    plain batched matmuls. With many agents, each micro-batch has rows of some agents only. The
    budget counts padded tokens, a shared prefix once. A row above the budget becomes a separate
    micro-batch.
    """
    sized = [_SizedRow.of(position, row) for position, row in rows]
    if not sized:
        return []
    best = _packed(sized, token_budget, max_rows)
    groups = Counter(position for position, _ in {row.prefix for row in sized})
    if len(best) > max(groups.values()):
        # A group of each agent is more than a micro-batch: few agents at a time need fewer and
        # larger products with their adapters.
        apart = _by_agents(sized, len(best))
        by_agents = [bucket for part in apart for bucket in _packed(part, token_budget, max_rows)]
        if len(by_agents) <= len(best) and _tokens(by_agents) <= _tokens(best):
            best = by_agents
    return [
        [(row.position, row.row) for row in _by_agent_and_prefix(bucket.rows)] for bucket in best
    ]


def _by_agent_and_prefix(rows: Sequence[_SizedRow]) -> list[_SizedRow]:
    """Return rows sorted by agent, those with the same prefix next to each other."""
    order: dict[tuple[int, bytes], int] = {}
    for row in rows:
        order.setdefault(row.prefix, len(order))
    return sorted(rows, key=lambda row: (row.position, order[row.prefix]))


def _packed(sized: Sequence[_SizedRow], token_budget: int, max_rows: int | None) -> list[_Bucket]:
    """Pack rows in the order that gives the fewest tokens."""
    candidates = [_fill(_by_length(sized), token_budget, max_rows)]
    if len({row.prefix for row in sized}) < len(sized):
        tiers = _by_prefix(sized)
        unsplit = _fill(tiers, token_budget, max_rows)
        single_rows = [[[row] for block in tier for row in block] for tier in tiers]
        split = _fill(single_rows, token_budget, max_rows)
        candidates.append(split if len(split) <= MAX_SPLIT_SHARE * len(unsplit) else unsplit)
    smallest = min(candidates, key=_tokens)
    # Ties in tokens and micro-batches: prefer the smaller largest micro-batch.
    tied = (buckets for buckets in candidates if len(buckets) == len(smallest))
    return min(tied, key=lambda buckets: (_tokens(buckets), max(b.tokens() for b in buckets)))


def _tokens(buckets: Sequence[_Bucket]) -> int:
    return sum(bucket.tokens() for bucket in buckets)


def _by_agents(rows: Sequence[_SizedRow], parts: int) -> list[list[_SizedRow]]:
    """Split the agents into at most `parts` parts of equal size; return the rows of each part."""
    positions = sorted({row.position for row in rows})
    size = -(-len(positions) // parts)
    part_of = {position: number // size for number, position in enumerate(positions)}
    rows_of_parts: list[list[_SizedRow]] = [[] for _ in range(-(-len(positions) // size))]
    for row in rows:
        rows_of_parts[part_of[row.position]].append(row)
    return rows_of_parts


def _by_length(rows: Sequence[_SizedRow]) -> list[_Tier]:
    """Order rows by length, longest first; a tier has as many rows as there are agents."""
    # Ties in length are ordered by number, so that neighbours belong to different agents.
    ordered = sorted(rows, key=lambda row: (-row.length, row.row.number))
    size = len({row.position for row in rows})
    return [[[row] for row in ordered[i : i + size]] for i in range(0, len(ordered), size)]


def _by_prefix(rows: Sequence[_SizedRow]) -> list[_Tier]:
    """Group rows by prefix, longest first; a tier has one group of each agent."""
    groups: dict[tuple[int, bytes], _Block] = {}
    for row in rows:
        groups.setdefault(row.prefix, []).append(row)
    tiers: list[_Tier] = []
    placed: Counter[int] = Counter()
    for block in sorted(groups.values(), key=lambda block: -max(row.length for row in block)):
        depth = placed[block[0].position]
        placed[block[0].position] += 1
        if depth == len(tiers):
            tiers.append([])
        tiers[depth].append(block)
    return [sorted(tier, key=lambda block: block[0].position) for tier in tiers]


def _fill(tiers: Sequence[_Tier], token_budget: int, max_rows: int | None) -> list[_Bucket]:
    """Cut tiers into the cheapest buckets; one costs its tokens plus `BUCKET_SHARE` of the budget.

    A tier above the budget is split between blocks, a block above the budget between rows.
    """
    buckets: list[_Bucket] = []
    for run in _cut(tiers, token_budget, max_rows):
        buckets.append(_Bucket())
        for block in (block for tier in run for block in tier):
            if not buckets[-1].fits(block, token_budget, max_rows):
                buckets.append(_Bucket())
            for row in block:
                if not buckets[-1].fits([row], token_budget, max_rows):
                    buckets.append(_Bucket())
                buckets[-1].add(row)
    return buckets


def _cut(
    tiers: Sequence[_Tier], token_budget: int, max_rows: int | None
) -> Iterator[Sequence[_Tier]]:
    """Yield runs of neighbouring tiers, one per bucket; a tier above the budget is a run alone."""
    bucket_cost = token_budget * BUCKET_SHARE
    # All pairs of ends are tried; neighbours of many tiers are joined to limit their number.
    size = -(-len(tiers) // MOST_CUTS)
    tiers = [[b for tier in tiers[i : i + size] for b in tier] for i in range(0, len(tiers), size)]
    tier_buckets = [_Bucket.of(row for block in tier for row in block) for tier in tiers]
    # For the tiers from `start` on: the least cost, with the smallest largest bucket; and where the
    # first run ends.
    least, ends = [(0.0, 0)] * (len(tiers) + 1), [0] * len(tiers)
    for start in range(len(tiers) - 1, -1, -1):
        bucket, least[start] = _Bucket(), (math.inf, 0)
        for last in range(start, len(tiers)):
            bucket.merge(tier_buckets[last])
            tokens, too_many = bucket.tokens(), max_rows is not None and bucket.count > max_rows
            if last > start and (tokens > token_budget or too_many):
                break
            cost, largest = least[last + 1]
            if (candidate := (tokens + bucket_cost + cost, max(tokens, largest))) < least[start]:
                least[start], ends[start] = candidate, last + 1
    start = 0
    while start < len(tiers):
        yield tiers[start : ends[start]]
        start = ends[start]


@dataclass(frozen=True)
class StepTotals:
    """Numbers of rows and generated tokens (>= 1) in each minibatch of an agent."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def minibatches(self) -> int:
        """Number of minibatches, the optimizer steps of one epoch."""
        return len(self.rows)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> StepTotals:
        """Count the rows and tokens of each minibatch that `assign_minibatches` made."""
        count = max((row.minibatch for row in rows), default=-1) + 1
        return cls(
            tuple(sum(row.minibatch == m for row in rows) for m in range(count)),
            tuple(
                max(1, sum(row.generated for row in rows if row.minibatch == m))
                for m in range(count)
            ),
        )


def assign_minibatches(
    rows: Sequence[Row], hparams: Hparams, seed: int, minibatches: int = 1
) -> None:
    """Assign rows to minibatches of `batch_size` in random order; clear `old` and `ref`.

    Without a `batch_size` there are `minibatches` of equal size.
    """
    size = hparams.batch_size or -(-len(rows) // minibatches)
    for number, row in enumerate(rows):
        row.old = row.ref = None
        row.minibatch = 0
        row.number = number
    if size >= len(rows):
        return
    order = generator(seed).permutation(len(rows))
    for turn, index in enumerate(order):
        rows[index].minibatch = turn // size


def filter_and_whiten(rows: list[Row], algorithm: AlgorithmConfig) -> list[Row]:
    """Filter one agent's rows and whiten their advantages; means exclude filtered rows."""
    if not rows or not (algorithm.filter_zero_adv or algorithm.whiten_advantages):
        return rows
    lengths = torch.tensor([row.generated for row in rows])
    mask = torch.arange(max(1, int(lengths.max()))) < lengths[:, None]
    values, is_kept = token_advantages(
        torch.tensor([row.advantage for row in rows], dtype=torch.float64),
        mask,
        whiten=algorithm.whiten_advantages,
        filter_zero=algorithm.filter_zero_adv,
        filter_eps=algorithm.adv_filter_eps,
    )
    # All tokens of a row still have the same advantage: take that of the first column.
    return [
        replace(row, advantage=float(value))
        for row, value, keep in zip(rows, values[:, 0], is_kept, strict=True)
        if keep
    ]
