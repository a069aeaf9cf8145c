"""A row of a dataset that knows its place in the person's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final


@final
class Row(dict[str, Any]):
    """Columns and values of a row, with its place.

    Attributes:
        place: Where it was read, for messages: "train (rows.jsonl), line 3"; rows of a file of text
            have the line in which they begin, others their number from 0.
    """

    __slots__ = ("_number", "_source")

    def __init__(self, values: Mapping[str, Any], source: str, number: int) -> None:
        super().__init__(values)
        self._source, self._number = source, number

    @property
    def place(self) -> str:
        """See the class."""
        return f"{self._source} {self._number}"

    def having(self, values: Mapping[str, Any]) -> Row:
        """Return a row of the same place with further values."""
        return Row({**self, **values}, self._source, self._number)

    def __reduce__(self) -> tuple[type[Row], tuple[dict[str, Any], str, int]]:
        return Row, (dict(self), self._source, self._number)


def place_of(row: Mapping[str, Any], otherwise: str) -> str:
    """Return the place of a row in the person's file, or `otherwise` for one that has none."""
    return row.place if isinstance(row, Row) else otherwise
