"""The layout of a batch: the adapter of each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, starmap
from operator import itemgetter


@dataclass(frozen=True)
class RowLayout:
    """The rows of a batch sorted by agent: `counts[i]` >= 0 rows of `adapters[i]`, not all 0.

    An adapter is PEFT's name, or None for the base without an adapter.
    """

    adapters: tuple[str | None, ...]
    counts: tuple[int, ...]

    def joined(self) -> RowLayout:
        """Return the layout with adjacent entries of the same adapter merged."""
        groups = groupby(zip(self.adapters, self.counts, strict=True), key=itemgetter(0))
        merged = [(name, sum(count for _, count in group)) for name, group in groups]
        return RowLayout(tuple(name for name, _ in merged), tuple(count for _, count in merged))

    @property
    def rows(self) -> int:
        """Total number of rows."""
        return sum(self.counts)

    def counts_of(self, adapters: Sequence[str | None]) -> tuple[int, ...]:
        """Return the number of rows of each of `adapters`, 0 for an adapter without rows.

        `adapters` must contain the adapters of the layout in the same order.
        """
        pairs = list(zip(self.adapters, self.counts, strict=True))
        counts = [pairs.pop(0)[1] if pairs and pairs[0][0] == name else 0 for name in adapters]
        assert not pairs, f"rows of {self.adapters} among those of {tuple(adapters)}"
        return tuple(counts)

    def slices(self) -> Iterator[slice]:
        """Return each agent's rows as a slice."""
        return starmap(slice, pairwise(accumulate(self.counts, initial=0)))
