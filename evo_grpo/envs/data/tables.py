"""Reads rows of a dataset from a datasets.Dataset, dicts, a pandas frame, or a file.

Files may come from strangers: a small compressed file may need much memory, so reading is limited.
"""

from __future__ import annotations

import csv
import json
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TextIO, cast, final

from evo_grpo.envs.data.hub import check_text_only, hub_dataset, read_hub
from evo_grpo.envs.messages import excerpt, listed, nearest
from evo_grpo.errors import DataError, EngineUnavailable
from evo_grpo.escaping import shorten
from evo_grpo.places import find, folders
from evo_grpo.settings.objects import OBJECT, PythonObject

#: One row of a dataset: column -> value.
DatasetRow = Mapping[str, Any]
Split = Literal["train", "validation", "test"]

SPLITS: tuple[Split, ...] = ("train", "validation", "test")

MAX_GIGABYTES = 1.0
"""Default of `env.max_data_gb`."""
VALUE_BYTES = 64
"""Estimated memory of a value beside its characters, in bytes."""
MOST_LEVELS = 200
"""Greatest depth of a row; it is limited because recursive functions write and compare rows."""

ROWS_AT_ONCE = 16
"""Rows of a Parquet file that are decoded together."""

NO_NONE = "give it a value, or drop the row"
"""Remedy for None in a column that a prompt prints."""

#: The JSON escape of a lone surrogate, which UTF-8 itself cannot hold.
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


@final
class Row(dict[str, Any]):
    """The values of a row by column, and the place of the row in its source, for messages.

    Attributes:
        place: For instance "train (rows.jsonl), line 3". A row of a text file has the line in which
            it begins; a row of any other source has its number from 0.
    """

    __slots__ = ("_number", "_source")

    def __init__(self, values: Mapping[str, Any], source: str, number: int) -> None:
        super().__init__(values)
        self._source, self._number = source, number

    @property
    def place(self) -> str:
        """The source of the row, and its line or number there."""
        return f"{self._source} {self._number}"

    def having(self, values: Mapping[str, Any]) -> Row:
        """Return a copy of the row with further values."""
        return Row({**self, **values}, self._source, self._number)

    def __reduce__(self) -> tuple[type[Row], tuple[dict[str, Any], str, int]]:
        return Row, (dict(self), self._source, self._number)


class LazyRows(Sequence[DatasetRow]):
    """A known number of rows, which are built on the first access."""

    def __init__(self, count: int, make: Callable[[], Sequence[DatasetRow]]) -> None:
        self._count = count
        self._made = cache(make)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 -- a row, or several of a slice
        return self._made()[index]


def place_of(row: Mapping[str, Any], otherwise: str) -> str:
    """Return the place of a row in the user's file, or `otherwise` for a row without one."""
    return row.place if isinstance(row, Row) else otherwise


def read_rows(source: object, name: str = "dataset", gigabytes: float = MAX_GIGABYTES) -> list[Row]:
    """Read a dataset into one `Row` per row, in order; there is at least one.

    Values of CSV files are strings ("019" keeps its zero). A missing value of a frame is None.

    Args:
        source: A path ending in .csv, .tsv, .jsonl, .json or .parquet, a `datasets.Dataset`, a
            pandas frame, a sequence of mappings, a `PythonObject` that holds one of these, or a
            dataset of the Hub.
        name: Name in messages, e.g. "train".
        gigabytes: The most memory that a file or a dataset of the Hub may take, as in
            `env.max_data_gb`.
    """
    if isinstance(source, PythonObject):
        source = source.value
    if (hub := hub_dataset(source)) is not None:
        place, rows = f"{name} ({hub.path})", enumerate(read_hub(hub, name, gigabytes))
    elif isinstance(source, str | Path):
        place, rows = f"{name} ({source})", _file_rows(Path(source), name, gigabytes)
    else:
        place, rows = name, enumerate(_object_rows(source, name))
    in_lines = isinstance(source, str | Path) and Path(source).suffix.lower() in _OF_LINES
    where = f"{place}, {'line' if in_lines else 'row'}"
    checked_rows = [_row(values, where, number) for number, values in rows]
    if not checked_rows:
        raise DataError(f"{place}: expected at least one row, got none")
    return checked_rows


def _object_rows(source: object, name: str) -> list[Any]:
    if hasattr(source, "columns") and hasattr(source, "notna"):  # a pandas frame
        frame = cast("Any", source)
        _check_once(map(str, frame.columns), f"{name}: the frame")
        return frame.astype(object).where(frame.notna(), None).to_dict("records")
    is_sequence = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    if isinstance(source, Mapping) or not is_sequence:
        got = f"{type(source).__name__}; a stream becomes a list with list(stream.take(1000))"
        if isinstance(source, Mapping):
            keys = listed(map(str, cast("Mapping[Any, Any]", source)))
            got = f'a mapping with the keys {keys}; pass a split, for instance dataset["train"]'
        raise DataError(
            f"{name}: expected a datasets.Dataset, a list of dicts, a pandas frame or a path, got "
            f"{got}"
        )
    check_text_only(source, name)
    return list(cast("Sequence[Any]", source))


def require_columns(
    rows: Sequence[DatasetRow],
    needs: Mapping[str, str],
    name: str,
    *,
    filled: Collection[str] = (),
) -> None:
    """Check that rows have the columns in `needs`: column -> what needs it, for messages.

    No value of the columns in `filled` may be None.
    """
    for number, row in enumerate(rows):
        for column, who in needs.items():
            if column in row and (row[column] is not None or column not in filled):
                continue
            why = f'the column "{column}" is None, which {who} would print as "None"; {NO_NONE}'
            if column not in row:
                why = (
                    f'no column "{column}", which {who} needs.{nearest(column, row)} '
                    f"Columns of the row: {listed(row)}"
                )
            raise DataError(f"{place_of(row, f'{name}, row {number}')}: {why}")


def _row(values: Any, source: str, number: int) -> Row:  # noqa: ANN401 -- of any dataset
    """Return `values` as a row of `source`, such as "train (rows.jsonl), line", or refuse them."""
    if isinstance(values, Row):
        return values
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise DataError(
            f"{source} {number}: expected a mapping of names of columns to values, got "
            f"{type(values).__name__} {excerpt(str(values))}"
        )
    return Row(values, source, number)


def _check_once(columns: Iterable[str], where: str) -> None:
    seen_columns: set[str] = set()
    for column in columns:
        if column in seen_columns:
            raise DataError(
                f'{where}: expected each column once, got "{column}" twice; rename one of the two'
            )
        seen_columns.add(column)


_Rows = Iterator[tuple[int, Any]]
"""The rows of a file, each with the line in which it begins, or its number in JSON and Parquet."""


def _file_rows(path: Path, name: str, gigabytes: float) -> _Rows:
    reader = _READERS.get(path.suffix.lower())
    try:
        place = find(path)
        mode = place.stat().st_mode
    except (OSError, ValueError, RuntimeError) as error:  # also ~ without a home folder
        hint = "a dataset of the Hugging Face Hub is named owner/name"
        if str(path).startswith(OBJECT):
            hint = "it stands for rows given from Python; give them from Python again"
        raise DataError(
            f"{name}: no file {shorten(str(path))!r} (looked in "
            f"{' and '.join(map(str, folders()))}): {getattr(error, 'strerror', error)}; {hint}"
        ) from error
    if reader is None or not stat.S_ISREG(mode):
        got = f"the ending {path.suffix!r}"
        if not stat.S_ISREG(mode):
            got = "a folder" if stat.S_ISDIR(mode) else "a pipe, a device or a socket"
        raise DataError(
            f"{name}: cannot read {str(path)!r}: expected a regular file ending in "
            f"{listed(_READERS)}, got {got}"
        )
    file = BoundedFile(place, f"{name} ({path})", gigabytes)
    try:
        yield from reader(file)
    except DataError:
        raise
    except RecursionError as error:
        raise _too_deep(file.place) from error
    except (OSError, ValueError, csv.Error) as error:  # JSON and UTF-8 raise ValueErrors
        kind = place.suffix.lstrip(".").upper()
        # Text is decoded in blocks: the row that was read last is not that of the byte.
        where = file.name if isinstance(error, UnicodeError) else file.place
        raise DataError(
            f"{where}: cannot be read as {kind} in UTF-8: {shorten(str(error))}"
        ) from error


@final
class BoundedFile:
    """An input file with a memory limit; messages name `place`, the part that was read last."""

    def __init__(self, path: Path, name: str, gigabytes: float) -> None:
        self.path, self.name, self.place = path, name, name
        self.left = self._limit = int(gigabytes * 1e9)

    def spend(self, count: int) -> None:
        """Count bytes of memory that rows take, and refuse to exceed the limit."""
        self.left -= count
        if self.left < 0:
            raise DataError(
                f"{self.name}: expected rows of at most {self._limit / 1e9:g} GB in memory, got "
                "more; give a smaller file, or raise env.max_data_gb"
            )

    def open(self, newline: str | None = None) -> TextIO:
        """Open the file as UTF-8 text, and count its size as memory."""
        self.spend(self.path.stat().st_size)
        # utf-8-sig: spreadsheets begin a file with a byte-order mark, which would become part of
        # a column's name.
        return self.path.open(encoding="utf-8-sig", newline=newline)


def _read_csv(file: BoundedFile) -> _Rows:
    delimiter = "\t" if file.path.suffix.lower() == ".tsv" else ","
    # The process limits a field to 131,072 characters; the file has another limit.
    csv.field_size_limit(max(csv.field_size_limit(), file.left))
    with file.open(newline="") as text:
        reader = csv.DictReader(text, delimiter=delimiter, restkey=None, restval=None)
        columns = list(reader.fieldnames or ())
        _check_once(filter(None, columns), f"{file.name}: the header")
        for row in reader:
            file.place = f"{file.name}, line {reader.line_num}"
            file.spend(VALUE_BYTES * (len(columns) + 1))
            if None in row or None in row.values():
                raise DataError(
                    f"{file.place}: more or fewer values than the header has columns "
                    f"({listed(filter(None, row))}); quote values that hold a {delimiter!r}"
                )
            # A row ends in the line that was read last, and may have begun above it.
            begin = reader.line_num - sum(value.count("\n") for value in row.values())
            row.pop("", None)  # the index of a pandas frame has no name
            yield begin, row


def _read_jsonl(file: BoundedFile) -> _Rows:
    with file.open() as text:
        for number, line in enumerate(text, start=1):
            if line.strip():
                file.place = f"{file.name}, line {number}"
                row = _parsed(file, line)
                if _needs_check(line):
                    _check(row, file.place)
                yield number, row


def _read_json(file: BoundedFile) -> _Rows:
    with file.open() as opened:
        text = opened.read()
    rows = _parsed(file, text)
    if not isinstance(rows, list):
        raise DataError(
            f"{file.name}: expected a list of objects, got {type(rows).__name__}; one object per "
            "line belongs in a file ending in .jsonl"
        )
    is_checked = _needs_check(text)
    for number, row in enumerate(cast("list[Any]", rows)):
        if is_checked:
            file.place = f"{file.name}, row {number}"
            _check(row, file.place)
        yield number, row


def _parsed(file: BoundedFile, text: str) -> object:
    # An estimate of the memory of the values, beside their characters.
    file.spend(VALUE_BYTES * sum(map(text.count, ",[{")))
    return json.loads(text)


def _needs_check(text: str) -> bool:
    """Return whether JSON text needs `_check`: it has many brackets, or an escaped surrogate."""
    brackets = text.count("[") + text.count("{")
    return brackets > MOST_LEVELS or _SURROGATE_ESCAPE.search(text) is not None


def _check(value: object, where: str, levels: int = MOST_LEVELS) -> None:
    """Refuse a value that is nested too deep or holds a lone surrogate."""
    if isinstance(value, str) and _HALF_CHARACTER.search(value):
        raise DataError(
            f"{where} has a string with half a character (a lone surrogate): {excerpt(value)}; "
            "remove it, or write the file anew as UTF-8"
        )
    if not isinstance(value, Mapping | list):
        return
    if not levels:
        raise _too_deep(where)
    container = cast("Mapping[object, object] | list[object]", value)
    for inner in (*container, *(container.values() if isinstance(container, Mapping) else ())):
        _check(inner, where, levels - 1)


def _too_deep(where: str) -> DataError:
    return DataError(
        f"{where} is nested too deep: expected at most {MOST_LEVELS} lists and objects within each "
        "other; flatten it, or keep it as a string"
    )


def _read_parquet(file: BoundedFile) -> _Rows:
    try:
        # Imported here: an extra, and slow to load for runs that read no Parquet.
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise EngineUnavailable(
            f'{file.name}: reading it needs pyarrow: pip install "evo-grpo[data]"'
        ) from error
    count = 0
    try:
        with ParquetFile(file.path) as opened:
            _check_once(opened.schema_arrow.names, file.name)
            # A value that is stored once may stand in every row and fill any memory, so rows are
            # decoded few at a time.
            for batch in opened.iter_batches(ROWS_AT_ONCE):
                file.place = f"{file.name}, rows {count} to {count + batch.num_rows - 1}"
                rows = batch.to_pylist()
                # Counted as text, since Arrow stores equal values once.
                file.spend(len(repr(rows)) + VALUE_BYTES * len(rows) * (batch.num_columns + 1))
                yield from enumerate(rows, count)
                count += len(rows)
    except DataError:
        raise
    # A time or number that Python has no type for, text that is not UTF-8, or no Parquet at all.
    except (ArrowException, ValueError, ArithmeticError, RecursionError, ImportError) as error:
        raise DataError(
            f"{file.place}: expected Parquet with values that Python can hold: "
            f"{shorten(str(error))}; convert the column, for instance to strings"
        ) from error


# Not pandas: its readers parse numbers and dates ("019" becomes 19), turn integers beside a missing
# value into floats and lists into arrays, and accept rows of the wrong length.
_READERS: dict[str, Callable[[BoundedFile], _Rows]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
_OF_LINES = (".csv", ".tsv", ".jsonl")
"""Endings of files whose rows are counted by lines."""
