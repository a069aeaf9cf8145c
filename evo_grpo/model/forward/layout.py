"""The layout of a batch: the adapter of each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap

from evo_grpo.errors import ShapeError


@dataclass(frozen=True)
class RowLayout:
    """The rows of a batch sorted by agent: `counts[i]` >= 0 rows of `adapters[i]`, not all 0.

    An adapter is PEFT's name, or None for the base without an adapter.
    """

    adapters: tuple[str | None, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if (
            len(self.adapters) != len(self.counts)
            or min(self.counts, default=-1) < 0
            or not sum(self.counts)
        ):
            raise ShapeError(
                "RowLayout: expected one count per adapter and at least one row, got "
                f"adapters={self.adapters}, counts={self.counts}"
            )

    def joined(self) -> RowLayout:
        """Return the layout with adjacent entries of the same adapter merged."""
        found: list[tuple[str | None, int]] = []
        for name, count in zip(self.adapters, self.counts, strict=True):
            before = found.pop()[1] if found and found[-1][0] == name else 0
            found.append((name, before + count))
        return RowLayout(tuple(name for name, _ in found), tuple(count for _, count in found))

    @property
    def rows(self) -> int:
        """Total rows."""
        return sum(self.counts)

    def counts_of(self, adapters: Sequence[str | None]) -> tuple[int, ...]:
        """Return the rows of each adapter of a longer list in the same order; 0 without rows."""
        left = list(zip(self.adapters, self.counts, strict=True))
        counts = [left.pop(0)[1] if left and left[0][0] == name else 0 for name in adapters]
        if left:
            raise ShapeError(
                f"RowLayout: expected some of the adapters {tuple(adapters)}, in this order, got "
                f"{self.adapters}"
            )
        return tuple(counts)

    def slices(self) -> Iterator[slice]:
        """Return each agent's rows as a slice."""
        return starmap(slice, pairwise(accumulate(self.counts, initial=0)))
