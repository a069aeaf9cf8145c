"""Rows from JSON files: one object per line, or a list of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from evo_grpo.envs.messages import excerpt
from evo_grpo.errors import DataError
from evo_grpo.printable import cut

MOST_LEVELS = 200
"""Deepest nesting of a row: what writes, compares or sends it goes one call deeper for each."""

#: How a lone surrogate is spelled; a file in UTF-8 holds none otherwise.
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def read_jsonl(path: Path, name: str) -> list[Any]:
    """Read one value per line; empty lines count for nothing.

    Args:
        path: The file.
        name: What messages call the dataset.

    Raises:
        DataError: A line is no JSON, or holds what no row can.
    """
    rows: list[Any] = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{name}: line {number} of {str(path)!r}"
                rows.append(_parsed(line, where))
                if _is_suspect(line):
                    _check(rows[-1], where)
    return rows


def read_json(path: Path, name: str) -> list[Any]:
    """Read a list of values.

    Args:
        path: The file.
        name: What messages call the dataset.

    Raises:
        DataError: It is no JSON, no list, or holds what no row can.
    """
    text = path.read_text(encoding="utf-8-sig")
    rows = _parsed(text, f"{name}: {str(path)!r}")
    if not isinstance(rows, list):
        raise DataError(
            f"{name}: expected {str(path)!r} to hold a list of objects, got {type(rows).__name__}; "
            "one object per line belongs in a file ending in .jsonl"
        )
    found = cast("list[Any]", rows)
    if _is_suspect(text):
        for number, row in enumerate(found):
            _check(row, f"{name}: row {number} of {str(path)!r}")
    return found


def _parsed(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise _too_deep(where) from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    except ValueError as error:  # an integer of thousands of digits
        raise DataError(f"{where} cannot be read: {cut(str(error))}") from error


def _is_suspect(text: str) -> bool:
    """Return whether JSON may hold what a row cannot: most of it need not be walked through."""
    deep = text.count("[") + text.count("{") > MOST_LEVELS
    return deep or _HALF.search(text) is not None


def _check(row: object, where: str) -> None:
    """Refuse a row that lies too deep, or with a string that is no text.

    Args:
        row: The row.
        where: File and row, for messages.
    """
    layer, above = [row], 0
    while layer:
        if above >= MOST_LEVELS and any(isinstance(value, Mapping | list) for value in layer):
            raise _too_deep(where)
        for value in layer:
            if isinstance(value, str) and _HALF_CHARACTER.search(value):
                raise DataError(
                    f"{where} has a string with half a character (a lone surrogate): "
                    f"{excerpt(value)}; remove it, or write the file anew as UTF-8"
                )
        layer = [inner for value in layer for inner in _inside(value)]
        above += 1


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, object]", value)
        return [*mapping, *mapping.values()]
    return cast("list[object]", value) if isinstance(value, list) else ()


def _too_deep(where: str) -> DataError:
    return DataError(
        f"{where} is nested too deep: expected at most {MOST_LEVELS} lists and objects within each "
        "other; flatten it, or keep it as a string"
    )
