"""How much a YAML document may hold, counted on its events before any value is made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, final

import yaml

MOST_BYTES = 1 << 20
"""Longest YAML file. Rows belong into a file that `env.train` names."""
MOST_LEVELS = 64
"""Deepest nesting of lists and mappings."""
MOST_VALUES = 100_000
"""Most scalars, lists and mappings, keys too."""


class Refused(yaml.MarkedYAMLError):
    """It is YAML, but holds what no configuration may; `problem` says what, the mark where."""


def refused(problem: str, mark: Any) -> Refused:  # noqa: ANN401 -- PyYAML's or libyaml's
    """Return the error for what is found at a mark."""
    return Refused(None, None, problem, mark)


class _Size(NamedTuple):
    """What an anchor stands for: so many values and characters, so many levels deep."""

    values: int
    characters: int
    levels: int


@dataclass
class _Open:
    """A list or mapping whose end has not been seen: what was counted before it, how deep it is."""

    anchor: str | None
    values: int
    characters: int
    deepest: int


@final
class Meter:
    """Counts what the events of a document amount to where every alias is written out.

    Nine anchors of nine aliases each make 3 * 10^8 values of a few lines; what an alias stands for
    is therefore added up, never visited.
    """

    def __init__(self) -> None:
        self._values = 0
        self._characters = 0
        self._open: list[_Open] = []
        #: By name; None while its list or mapping is open.
        self._anchors: dict[str, _Size | None] = {}

    def see(self, event: yaml.Event) -> None:
        """Count an event.

        Raises:
            Refused: There are too many, or they lie too deep, or an anchor contains itself.
        """
        if isinstance(event, yaml.CollectionEndEvent):
            self._close()
        elif isinstance(event, yaml.AliasEvent):
            # One that is not known is for the parser to report, in its own words.
            size = self._anchors.get(str(event.anchor), _Size(1, 0, 0))
            if size is None:
                problem = "expected plain values, but one contains itself; write it out"
                raise refused(problem, event.start_mark)
            self._add(size, event)
        elif isinstance(event, yaml.ScalarEvent):
            size = _Size(1, len(event.value), 0)
            if event.anchor is not None:
                self._anchors[event.anchor] = size
            self._add(size, event)
        elif isinstance(event, yaml.CollectionStartEvent):
            if event.anchor is not None:
                self._anchors[event.anchor] = None
            deeper = len(self._open) + 1
            self._open.append(_Open(event.anchor, self._values, self._characters, deeper))
            self._add(_Size(1, 0, 0), event)

    def _add(self, size: _Size, event: yaml.Event) -> None:
        self._values += size.values
        self._characters += size.characters
        depth = len(self._open) + size.levels
        if self._open:
            self._open[-1].deepest = max(self._open[-1].deepest, depth)
        if depth > MOST_LEVELS:
            problem = f"expected at most {MOST_LEVELS} levels of lists and mappings, got more"
        elif self._values > MOST_VALUES:
            problem = (
                f"expected at most {MOST_VALUES:,} values, with aliases written out, got more; "
                "rows belong into a file that env.train names"
            )
        elif self._characters > MOST_BYTES:
            problem = (
                f"expected at most {MOST_BYTES:,} characters, with aliases written out, got more; "
                "rows belong into a file that env.train names"
            )
        else:
            return
        raise refused(problem, event.start_mark)

    def _close(self) -> None:
        ended = self._open.pop()
        if self._open:
            self._open[-1].deepest = max(self._open[-1].deepest, ended.deepest)
        if ended.anchor is not None:
            self._anchors[ended.anchor] = _Size(
                self._values - ended.values,
                self._characters - ended.characters,
                ended.deepest - len(self._open),
            )
