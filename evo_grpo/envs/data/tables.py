"""Rows of a dataset: a datasets.Dataset, dicts, a pandas frame, or a file.

Files may come from strangers: a small compressed file may need much memory, so reading is limited.
"""

from __future__ import annotations

import io
import json
import re
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast, final

from evo_grpo.envs.data.hub import check_text_only, hub_dataset, read_hub
from evo_grpo.envs.messages import excerpt, listed, nearest
from evo_grpo.envs.task import DatasetRow
from evo_grpo.errors import DataError, EngineUnavailable
from evo_grpo.escaping import shorten
from evo_grpo.places import find, folders
from evo_grpo.settings.objects import OBJECT, PythonObject

MAX_GIGABYTES = 1.0
"""Default of `env.max_data_gb`."""
HOLE = 4096
"""Bytes of 0 in a row that are no text."""
VALUE_BYTES = 64
"""Estimated memory of a value, beside its characters."""
MOST_LEVELS = 200
"""Deepest nesting of a row; recursive functions write, compare and send it."""

ROWS_AT_ONCE = 16
"""Rows of a Parquet file that are decoded together."""

NO_NONE = "give it a value, or drop the row"
"""Remedy for None in a column that a prompt prints."""

#: The escape of a lone surrogate, the only way for one into a file in UTF-8.
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


@final
class Row(dict[str, Any]):
    """Columns and values of a row, with its place for messages.

    Attributes:
        place: For instance "train (rows.jsonl), line 3". Rows of a text file have the line in which
            they begin, others their number from 0.
    """

    __slots__ = ("_number", "_source")

    def __init__(self, values: Mapping[str, Any], source: str, number: int) -> None:
        super().__init__(values)
        self._source, self._number = source, number

    @property
    def place(self) -> str:
        """The place where the row was read."""
        return f"{self._source} {self._number}"

    def having(self, values: Mapping[str, Any]) -> Row:
        """Return a row of the same place with further values."""
        return Row({**self, **values}, self._source, self._number)

    def __reduce__(self) -> tuple[type[Row], tuple[dict[str, Any], str, int]]:
        return Row, (dict(self), self._source, self._number)


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
    hub = hub_dataset(source)
    if hub is not None:
        return _checked(read_hub(hub, name, gigabytes), f"{name} ({hub.path}), row")
    if isinstance(source, str | Path):
        return _read_file(Path(source), name, gigabytes)
    rows: list[Any]
    if hasattr(source, "columns") and hasattr(source, "notna"):  # a pandas frame
        frame = cast("Any", source)
        _check_once(map(str, frame.columns), f"{name}: the frame")
        rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    elif isinstance(source, Mapping):
        raise DataError(
            f"{name}: expected one split, got a mapping with the keys {listed(map(str, source))}; "
            'pass one of its values, for instance dataset["train"]'
        )
    elif hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        check_text_only(source, name)
        rows = list(cast("Sequence[Any]", source))
    else:
        raise DataError(
            f"{name}: expected a datasets.Dataset, a list of dicts, a pandas frame or a path, "
            f"got {type(source).__name__}; a stream becomes a list with list(stream.take(1000))"
        )
    if not rows:
        raise DataError(f"{name}: expected at least one row, got an empty dataset")
    return _checked(rows, f"{name}, row")


def require_columns(
    rows: Sequence[DatasetRow],
    needs: Mapping[str, str],
    name: str,
    *,
    filled: Collection[str] = (),
) -> None:
    """Check that rows have the columns in `needs`, which maps each to the part that needs it.

    No value of the columns in `filled` may be None.
    """
    for number, row in enumerate(rows):
        for column, who in needs.items():
            if column in row and (row[column] is not None or column not in filled):
                continue
            place = place_of(row, f"{name}, row {number}")
            if column not in row:
                raise DataError(
                    f'{place}: no column "{column}", which {who} needs.'
                    f"{nearest(column, row)} Columns of the row: {listed(row)}"
                )
            raise DataError(
                f'{place}: the column "{column}" is None, which {who} would print as "None"; '
                f"{NO_NONE}"
            )


def _checked(rows: Sequence[Any], source: str, numbers: Sequence[int] | None = None) -> list[Row]:
    """Return rows with their places: `source` and a number in the file; None counts from 0."""
    checked: list[Row] = []
    for number, row in zip(numbers or range(len(rows)), rows, strict=True):
        if not isinstance(row, Mapping):
            raise DataError(
                f"{source} {number}: expected a mapping of column to value, "
                f"got {type(row).__name__} {str(row)[:60]!r}"
            )
        wrong = [key for key in row if not isinstance(key, str)]
        if wrong:
            raise DataError(
                f"{source} {number}: expected strings as names of columns, got {wrong[0]!r}; "
                "rename it"
            )
        checked.append(row if isinstance(row, Row) else Row(row, source, number))
    return checked


def _read_file(path: Path, name: str, gigabytes: float) -> list[Row]:
    if str(path).startswith(OBJECT):
        raise DataError(
            f"{name}: expected rows, got {str(path)!r}, which stands for rows given from Python; "
            "give them from Python again"
        )
    reader = _READERS.get(path.suffix.lower())
    called = f"{name} ({path})"
    try:
        path = find(path)
        there, is_folder = path.exists(), path.is_dir()
    except (OSError, RuntimeError) as error:  # a name that is too long, or ~ without a home folder
        why = getattr(error, "strerror", error)
        raise DataError(f"{name}: no file {shorten(str(path))!r}: {why}") from error
    if not there:
        raise DataError(
            f"{name}: no file {str(path)!r} (looked in {' and '.join(map(str, folders()))}); a "
            "dataset of the Hugging Face Hub is named owner/name"
        )
    if reader is None or is_folder:
        raise DataError(
            f"{name}: cannot read {str(path)!r}: expected a file ending in {listed(_READERS)}, "
            f"got {'a folder' if is_folder else f'the ending {path.suffix!r}'}"
        )
    try:
        rows, lines = reader(BoundedFile(path, name, gigabytes))
    except OSError as error:
        raise DataError(f"{name}: cannot read {str(path)!r}: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name}: cannot read {str(path)!r} as UTF-8 text: {error}; save it as UTF-8"
        ) from error
    if not rows:
        raise DataError(f"{name}: expected at least one row in {str(path)!r}, got none")
    return _checked(rows, f"{called}, {'row' if lines is None else 'line'}", lines)


@final
class BoundedFile:
    """A regular file, and an estimate of the memory that its contents take."""

    def __init__(self, path: Path, name: str, gigabytes: float = MAX_GIGABYTES) -> None:
        self.path, self.name = path, name
        self.left = self._limit = int(gigabytes * 1e9)
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError(
                f"{name}: cannot read {str(path)!r}: expected a regular file, got a pipe, a device "
                "or a socket; write its rows to a file"
            )

    def spend(self, count: int) -> None:
        """Count bytes of memory; refuse to exceed the limit."""
        self.left -= count
        if self.left < 0:
            raise DataError(
                f"{self.name}: {str(self.path)!r}: expected rows of at most "
                f"{self._limit / 1e9:g} GB in memory, got more; give a smaller file, or raise "
                "env.max_data_gb"
            )

    def open(self, newline: str | None = None) -> TextIO:
        """Open the file as UTF-8 text; reading more than the limit is an error."""
        # utf-8-sig: spreadsheets begin a file with a byte-order mark, which would become part of
        # a column's name.
        raw = io.BufferedReader(_Counted(self))
        return io.TextIOWrapper(raw, encoding="utf-8-sig", newline=newline)


class _Counted(io.RawIOBase):
    """The bytes of a file, counted as they are read."""

    def __init__(self, file: BoundedFile) -> None:
        self._file, self._inner = file, file.path.open("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] -- a writable buffer
        count = self._inner.readinto(buffer) or 0
        self._file.spend(count)
        # A hole, which takes no room on the disk, reads as bytes of 0.
        if count >= HOLE and not bytes(buffer[:count]).strip(b"\0"):
            raise DataError(
                f"{self._file.name}: cannot read {str(self._file.path)!r}: expected UTF-8 text, "
                "got bytes of 0; save it as UTF-8"
            )
        return count

    def close(self) -> None:
        self._inner.close()
        super().close()


_Read = tuple[list[Any], Sequence[int] | None]
"""Rows of a file, and the line in which each begins, or None where lines are no rows."""


def _read_csv(file: BoundedFile) -> _Read:
    import csv  # only this kind of file needs it

    path, name = str(file.path), file.name
    delimiter = "\t" if file.path.suffix.lower() == ".tsv" else ","
    rows: list[Any] = []
    lines: list[int] = []
    # The process limits a field to 131,072 characters; the file has another limit.
    csv.field_size_limit(max(csv.field_size_limit(), file.left))
    with file.open(newline="") as text:
        reader = csv.DictReader(text, delimiter=delimiter, restkey=None, restval=None)
        try:
            columns = list(reader.fieldnames or ())
            _check_header(columns, f"{name}: the header of {path!r}")
            for row in reader:
                file.spend(VALUE_BYTES * (len(columns) + 1))
                if None in row or None in row.values():
                    raise DataError(
                        f"{name}: line {reader.line_num} of {path!r} has more or fewer values than "
                        f"the header has columns ({listed(c for c in row if c)}); quote values "
                        f"that hold a {delimiter!r}"
                    )
                rows.append(row)
                # A row ends in the line that was read last, and may have begun above it.
                lines.append(reader.line_num - sum(value.count("\n") for value in row.values()))
        except csv.Error as error:
            raise DataError(
                f"{name}: line {reader.line_num} of {path!r} cannot be read: {error}"
            ) from error
    for row in rows:
        row.pop("", None)  # the index of a pandas frame
    return rows, lines


def _check_header(columns: Sequence[str], where: str) -> None:
    """Refuse columns of a CSV that share a name or have none, except for the index of pandas."""
    unnamed = [number for number, column in enumerate(columns, start=1) if not column]
    if unnamed not in ([], [1]) or len(columns) == len(unnamed) == 1:
        raise DataError(
            f"{where}: expected a name for every column, got none for column {unnamed[-1]}; name "
            "it, or remove it (only a first column may have no name, which is left out: the index "
            "of a pandas frame)"
        )
    _check_once(columns, where)


def _check_once(columns: Iterable[str], where: str) -> None:
    seen: set[str] = set()
    for column in columns:
        if column in seen:
            raise DataError(
                f'{where}: expected each column once, got "{column}" twice; rename one of the two'
            )
        seen.add(column)


def _read_jsonl(file: BoundedFile) -> _Read:
    rows: list[Any] = []
    lines: list[int] = []
    with file.open() as text:
        for number, line in enumerate(text, start=1):
            if line.strip():
                where = f"{file.name}: line {number} of {str(file.path)!r}"
                rows.append(_parsed(file, line, where))
                lines.append(number)
                if _is_suspect(line):
                    _check(rows[-1], where)
    return rows, lines


def _read_json(file: BoundedFile) -> _Read:
    path, name = str(file.path), file.name
    with file.open() as opened:
        text = opened.read()
    rows = _parsed(file, text, f"{name}: {path!r}")
    if not isinstance(rows, list):
        raise DataError(
            f"{name}: expected {path!r} to hold a list of objects, got {type(rows).__name__}; "
            "one object per line belongs in a file ending in .jsonl"
        )
    found = cast("list[Any]", rows)
    if _is_suspect(text):
        for number, row in enumerate(found):
            _check(row, f"{name}: row {number} of {path!r}")
    return found, None


def _parsed(file: BoundedFile, text: str, where: str) -> object:
    # An estimate of the memory of the values, beside their characters.
    file.spend(VALUE_BYTES * sum(map(text.count, ",[{")))
    try:
        return json.loads(text)
    except RecursionError as error:
        raise _too_deep(where) from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    except ValueError as error:  # an integer of thousands of digits
        raise DataError(f"{where} cannot be read: {shorten(str(error))}") from error


def _is_suspect(text: str) -> bool:
    """Return whether JSON may hold values that a row cannot hold, so that they must be checked."""
    deep = text.count("[") + text.count("{") > MOST_LEVELS
    return deep or _HALF.search(text) is not None


def _check(value: object, where: str, above: int = 0) -> None:
    """Refuse a row that is nested too deep or holds a lone surrogate."""
    if isinstance(value, str) and _HALF_CHARACTER.search(value):
        raise DataError(
            f"{where} has a string with half a character (a lone surrogate): {excerpt(value)}; "
            "remove it, or write the file anew as UTF-8"
        )
    if not isinstance(value, Mapping | list):
        return
    if above >= MOST_LEVELS:
        raise _too_deep(where)
    inside = cast("Mapping[object, object] | list[object]", value)
    values = [*inside, *(inside.values() if isinstance(inside, Mapping) else ())]
    for inner in values:
        _check(inner, where, above + 1)


def _too_deep(where: str) -> DataError:
    return DataError(
        f"{where} is nested too deep: expected at most {MOST_LEVELS} lists and objects within each "
        "other; flatten it, or keep it as a string"
    )


def _read_parquet(file: BoundedFile) -> _Read:
    path, name = str(file.path), file.name
    try:
        # Imported here: an extra, and slow to load for runs that read no Parquet.
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise EngineUnavailable(
            f'{name}: reading {path!r} needs pyarrow: pip install "evo-grpo[data]"'
        ) from error
    unreadable = ArrowException, ValueError, ArithmeticError, RecursionError, ImportError
    rows: list[Any] = []
    try:
        with ParquetFile(file.path) as opened:
            _check_once(opened.schema_arrow.names, f"{name}: {path!r}")
            # A value that is stored once may stand in every row and fill any memory, so rows are
            # decoded few at a time.
            for part in opened.iter_batches(ROWS_AT_ONCE):
                try:
                    read = part.to_pylist()
                # A time or number that Python has no type for, or text that is not UTF-8.
                except unreadable as error:
                    raise DataError(
                        f"{name}: {path!r}, rows {len(rows)} to {len(rows) + part.num_rows - 1}: "
                        f"expected values that Python can hold: {shorten(str(error))}; convert the "
                        "column, for instance to strings"
                    ) from error
                # The text of the values, since Arrow stores equal ones once.
                file.spend(len(repr(read)) + VALUE_BYTES * len(read) * (part.num_columns + 1))
                rows += read
    except ArrowException as error:
        raise DataError(f"{name}: {path!r} is not a Parquet file: {shorten(str(error))}") from error
    return rows, None


# Not pandas: its readers parse numbers and dates ("019" becomes 19), turn integers beside a missing
# value into floats and lists into arrays, and accept rows of the wrong length.
_READERS: dict[str, Callable[[BoundedFile], _Read]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
