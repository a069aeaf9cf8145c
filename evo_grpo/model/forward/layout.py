"""Which adapter the rows of a batch belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evo_grpo.errors import ShapeError


@dataclass(frozen=True)
class RowLayout:
    """Which adapter the rows of a batch belong to.

    Rows are sorted by agent: `counts[i]` rows of `adapters[i]`.

    Attributes:
        adapters: PEFT adapter names, one per agent; None takes the base alone.
        counts: Rows per agent, >= 0, not all 0.
    """

    adapters: tuple[str | None, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse a layout that does not describe a batch."""
        if (
            len(self.adapters) != len(self.counts)
            or min(self.counts, default=-1) < 0
            or not sum(self.counts)
        ):
            raise ShapeError(
                "RowLayout: expected one count per adapter and at least one row, got "
                f"adapters={self.adapters}, counts={self.counts}"
            )

    @property
    def rows(self) -> int:
        """Total rows."""
        return sum(self.counts)

    def counts_of(self, adapters: Sequence[str | None]) -> tuple[int, ...]:
        """Return rows per adapter of a longer list, 0 for those that have none here.

        Raises:
            ShapeError: When the layout's adapters are not some of these, in the same order.
        """
        left = list(zip(self.adapters, self.counts, strict=True))
        counts = [left.pop(0)[1] if left and left[0][0] == name else 0 for name in adapters]
        if left:
            raise ShapeError(
                f"RowLayout: expected some of the adapters {tuple(adapters)}, in this order, got "
                f"{self.adapters}"
            )
        return tuple(counts)

    def slices(self) -> Iterator[slice]:
        """Yield each agent's rows as a slice."""
        start = 0
        for count in self.counts:
            yield slice(start, start + count)
            start += count
