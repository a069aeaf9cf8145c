"""Divides rows into micro-batches under a token budget, and pads each to tensors.

Rows in order of length need less padding; rows in order of prompt compute the tokens of a prompt
once (see `evo_grpo.model.forward.prefix`). Which order saves more depends on the lengths of prompts
and completions, so both orders are tried and the one with fewer tokens is used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from evo_grpo.errors import ShapeError
from evo_grpo.learn.rows import Row
from evo_grpo.model.forward.prefix import SharedPrefix, find_shared_prefixes
from evo_grpo.model.forward.sending import send

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
    tokens before the first generated token. `prefix` is `position` with these tokens; if it is
    equal in several rows, they can share the computation of these tokens.
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
    """A micro-batch under construction, with the largest lengths of its rows.

    `count` is the number of rows, including those that are counted but not in `rows`. `length`,
    `prefix_length` and `rest_length` (tokens after the prefix) are the largest of any row.
    """

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
        """Count the rows of another bucket as rows of this one, but do not add them to `rows`."""
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
        """Count the padded tokens with the rows `added`; prefixes are shared if that saves any."""
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
    """Split `rows`, pairs of an agent's position and a row, into micro-batches sorted by agent.

    Micro-batches have little padding and, if possible, the same number of rows of each agent, for
    plain batched matmuls. With many agents, each micro-batch has rows of some agents only. A
    micro-batch has at most `token_budget` padded tokens, where a shared prefix counts once. A
    single row above the budget becomes a separate micro-batch.
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
    """Return rows sorted by agent; rows with the same prefix are next to each other."""
    order: dict[tuple[int, bytes], int] = {}
    for row in rows:
        order.setdefault(row.prefix, len(order))
    return sorted(rows, key=lambda row: (row.position, order[row.prefix]))


def _packed(sized: Sequence[_SizedRow], token_budget: int, max_rows: int | None) -> list[_Bucket]:
    """Pack rows in order of length and in order of prefix; return the result of fewer tokens."""
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
    """Group rows by prefix, the group of the longest row first; tier i has each agent's group i."""
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
    """Cut tiers into the cheapest buckets: each costs its tokens plus `BUCKET_SHARE` of the budget.

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
    """Yield the cheapest runs of neighbouring tiers, one per bucket; see `_fill` for the cost.

    A tier above the budget is a run by itself.
    """
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
class MicroBatch:
    """Rows of several agents in one forward pass, sorted by agent.

    Attributes:
        owners: Position of each row's agent among the agents of the learn call.
        positions: (B,) `owners` as a tensor on the device.
        counts: Number of rows of each agent in `present`, the positions of agents with rows here.
        input_ids: (B, T) int64, padded on the right; T is the length of the longest row minus 1.
        targets: (M,) int64 generated token ids, row by row.
        where: (M,) flat positions in (B, T) of the hidden states that predict the targets.
        mask: (B, C) bool, the first n columns of a row with n generated tokens.
        advantages: (B,) fp32.
        prefix: The same rows with each common prefix stored once; None if this would not save work.
    """

    rows: list[Row]
    owners: list[int]
    positions: Tensor
    counts: tuple[int, ...]
    present: tuple[int, ...]
    input_ids: Tensor
    targets: Tensor
    where: Tensor
    mask: Tensor
    advantages: Tensor
    prefix: SharedPrefix | None = None

    def pad(self, flat: Tensor) -> Tensor:
        """Return values (M,) of generated tokens as (B, C), 0 outside the mask; differentiable."""
        return torch.zeros(self.mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(
            self.mask, flat
        )

    def gather(self, name: str) -> Tensor:
        """Return the rows' attribute `name`, "old" or "ref", as (B, C) nats; 0 where it is None."""
        device = self.mask.device
        parts = [
            torch.zeros(row.generated, device=device)
            if (logprobs := getattr(row, name)) is None
            else logprobs
            for row in self.rows
        ]
        return self.pad(torch.cat(parts))

    def sampler_logprobs(self, old: Tensor) -> Tensor:
        """Return the rollout engine's log-probs (B, C), nats; `old` (B, C) in rows without any."""
        for row in self.rows:
            if row.sampler_logprobs is not None and len(row.sampler_logprobs) != row.generated:
                raise ShapeError(
                    f"sampler_logprobs: expected {row.generated} numbers, one per generated token, "
                    f"got {len(row.sampler_logprobs)}; give one for every True of the row's mask"
                )
        recorded = [(row.sampler_logprobs, row.generated) for row in self.rows]
        flat = np.concatenate(
            [np.zeros(n, np.float32) if logprobs is None else logprobs for logprobs, n in recorded]
        )
        is_recorded = self.mask.new_tensor([[logprobs is not None] for logprobs, _ in recorded])
        return torch.where(is_recorded, self.pad(torch.from_numpy(flat).to(old)), old)

    def scatter(self, name: str, flat: Tensor) -> None:
        """Set each row's attribute `name`, "old" or "ref", to its part of `flat` (M,), detached."""
        parts = flat.detach().split([row.generated for row in self.rows])
        for row, part in zip(self.rows, parts, strict=True):
            setattr(row, name, part)


def collate(bucket: Sequence[tuple[int, Row]], pad_id: int, device: torch.device) -> MicroBatch:
    """Build a micro-batch from pairs of an agent's position and a row, sorted by position."""
    rows = [row for _, row in bucket]
    positions = np.asarray([position for position, _ in bucket])
    width = max(2, *(len(row.token_ids) for row in rows))
    ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    masks = np.zeros((len(rows), width), dtype=bool)
    for i, row in enumerate(rows):
        ids[i, : len(row.token_ids)] = row.token_ids
        masks[i, : len(row.token_ids)] = row.mask
    masks[:, 0] = False
    line, column = np.nonzero(masks)
    generated = masks.sum(axis=1)
    compact = np.arange(max(1, int(generated.max()))) < generated[:, None]
    present, counts = np.unique(positions, return_counts=True)
    where = line * (width - 1) + column - 1
    advantages = np.array([row.advantage for row in rows], dtype=np.float32)
    sent = send((positions, ids[:, :-1], ids[line, column], where, compact, advantages), device)
    return MicroBatch(
        rows=rows,
        owners=positions.tolist(),
        positions=sent[0],
        counts=tuple(counts.tolist()),
        present=tuple(present.tolist()),
        input_ids=sent[1],
        targets=sent[2],
        where=sent[3],
        mask=sent[4].bool(),
        advantages=sent[5],
        prefix=find_shared_prefixes(positions, ids, masks, device),
    )
