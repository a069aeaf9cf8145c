import json
import os
import pickle
import subprocess
import sys

import pandas as pd
import pytest

from evo_grpo.envs.builtin.dataset import divide
from evo_grpo.envs.data.tables import MOST_LEVELS, read_rows, require_columns
from evo_grpo.errors import DataError

ROWS = [{"question": "1+1=", "answer": "002"}, {"question": "a,b\n?", "answer": "é"}]
FILES = {
    "csv": 'question,answer\n1+1=,002\n"a,b\n?",é\n',
    "tsv": 'question\tanswer\n1+1=\t002\n"a,b\n?"\té\n',
    "jsonl": "\n".join(map(json.dumps, ROWS)) + "\n\n",
    "json": json.dumps(ROWS, ensure_ascii=False),
}


@pytest.mark.parametrize("ending", [*FILES, "parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, ending):
    path = tmp_path / f"rows.{ending}"
    if ending == "parquet":
        pd.DataFrame(ROWS).to_parquet(path)
        assert read_rows(path) == ROWS
        return
    path.write_text(FILES[ending], encoding="utf-8")
    assert read_rows(path) == read_rows(str(path)) == ROWS
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # the mark of spreadsheets
    assert read_rows(path) == ROWS


def test_lists_frames_and_datasets_give_rows_of_python_values():
    datasets = pytest.importorskip("datasets")
    assert read_rows(ROWS) == ROWS
    assert read_rows(pd.DataFrame(ROWS)) == ROWS
    assert read_rows(datasets.Dataset.from_list(ROWS)) == ROWS
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", None], "c": [0.5, float("nan")]})
    rows = read_rows(frame)
    assert rows == [{"a": 1, "b": "x", "c": 0.5}, {"a": 2, "b": None, "c": None}]
    assert type(rows[0]["a"]) is int
    source = [{"question": "x"}]
    read_rows(source)[0]["question"] = "y"
    assert source == [{"question": "x"}]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "train: expected at least one row, got none"),
        (pd.DataFrame({"a": []}), "train: expected at least one row"),
        (["a"], "train, row 0: expected a mapping of names .* got str 'a'"),
        (pd.DataFrame([[1]]), "train, row 0: expected a mapping of names of columns .* got dict"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), 'the frame: expected each column once, got "'),
        ({"train": [1], "test": [2]}, 'mapping with the keys test, train.*dataset\\["train"\\]'),
        (iter([{"a": 1}]), "expected a datasets.Dataset, a list of dicts.*got list_iterator"),
        (7, "got int"),
        ("nowhere.csv", "train: no file 'nowhere.csv'.*named owner/name"),
        ("openai/gsm8k.csv", "train: no file 'openai/gsm8k.csv'"),
        ("~nobody-of-this-name/a.csv", "train: no file"),
        ("x" * 5000 + ".csv", "train: no file"),
        ("a\0b.csv", "train: no file"),
        ("object:list of 3 rows", "stands for rows given from Python; give them"),
    ],
)
def test_what_is_no_table_is_named(source, message):
    with pytest.raises(DataError, match=message) as caught:
        read_rows(source, "train")
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.csv", "question,answer\n", "expected at least one row, got none"),
        ("a.jsonl", "", "expected at least one row, got none"),
        ("a.json", "[]", "expected at least one row, got none"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "line 2: cannot be read as JSONL in UTF-8: Expecting"),
        ("a.jsonl", "[1]\n", "line 1: expected a mapping"),
        (
            "a.jsonl",
            '{}\n{"q": ' + "1" * 5000 + "}",
            "line 2: cannot be .*Exceeds the",
        ),
        ("a.json", '{"a": 1}', "list of objects, got dict; one object per line"),
        ("a.json", "{", "cannot be read as JSON in UTF-8"),
        ("a.csv", "a,b\n1,2,3\n", "line 2: more or fewer values than the header"),
        ("a.csv", "a,b\n1\n", "line 2: more or fewer values than the header"),
        ("a.csv", "a,b,a\n1,2,3\n", 'the header: expected each column once, got "a" twice; rename'),
        # Text is decoded in blocks, so that the row which was read last is not that of the byte.
        ("a.csv", b"q\n" + b"1\n" * 9000 + b"\xff\n", r"a.csv\): cannot be read as CSV in UTF-8"),
        ("a.parquet", "not parquet", "expected Parquet with values"),
        ("a.txt", "x", r"ending in .csv, .json, .jsonl, .parquet, .tsv, got the ending '.txt'"),
    ],
)
def test_a_broken_file_is_named(tmp_path, file, content, message):
    path = tmp_path / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=rf"(?s)^train.*(?={file}).*{message}"):
        read_rows(path, "train")


def test_a_field_of_a_csv_may_be_of_any_length_and_hold_a_null_character(tmp_path):
    text = "é" * 400_000
    for ending, separator in (("csv", ","), ("tsv", "\t")):
        path = tmp_path / f"rows.{ending}"
        path.write_text(f'question{separator}answer\n"{text}"{separator}2\0\n', encoding="utf-8")
        assert read_rows(path) == [{"question": text, "answer": "2\0"}]


def test_a_missing_column_is_named_with_the_nearest_one():
    with pytest.raises(DataError) as caught:
        require_columns(ROWS, {"qestion": "the prompt template"}, "train")
    assert str(caught.value) == (
        'train, row 0: no column "qestion", which the prompt template needs. '
        'Did you mean "question"? Columns of the row: answer, question'
    )
    with pytest.raises(DataError, match='test, row 1: no column "b"'):
        require_columns([{"b": 1}, {"a": 1}], {"b": "the reward"}, "test")


def test_divide_gives_exact_shares_of_different_keys():
    rows = [{"q": str(n)} for n in range(100)]
    shares = {"train": 80, "validation": 5, "test": 15}
    divided = divide(rows, shares, lambda row: row["q"], seed=1)
    assert {name: len(part) for name, part in divided.items()} == shares
    assert sorted(int(row["q"]) for part in divided.values() for row in part) == list(range(100))
    assert divided == divide(rows, shares, lambda row: row["q"], seed=1)
    assert divided != divide(rows, shares, lambda row: row["q"], seed=2)


def test_divide_never_puts_one_key_into_two_splits():
    rows = [{"q": n % 7, "n": n} for n in range(50)]
    shares = {"train": 1000, "validation": 1, "test": 1}
    divided = divide(rows, shares, lambda row: str(row["q"]), seed=0)
    keys = [{row["q"] for row in divided[name]} for name in shares]
    assert [len(part) for part in keys] == [5, 1, 1]
    assert set.union(*keys) == set(range(7))
    assert sum(map(len, divided.values())) == 50
    with pytest.raises(DataError, match="2 rows with 1 different prompts cannot be divided"):
        divide([{"q": 1}] * 2, {"train": 1, "test": 1}, lambda row: str(row["q"]), seed=0)


# --- JSON that Python itself reads badly, or not at all -----------------------------------------


def deep(levels):
    return '{"a": ' * (levels - 1) + "[" + "]" + "}" * (levels - 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((deep(levels), "is nested too deep") for levels in (MOST_LEVELS + 1, 900, 100_000)),
        *(
            (row, "has a string with half a character")
            for row in ('{"q": {"b": ["\\uDC80"]}}', '{"\\udfff": 1}', '["\\ud83d"]')
        ),
    ],
)
def test_what_a_row_cannot_hold_is_named_with_its_line(tmp_path, text, message):
    lines, whole = tmp_path / "rows.jsonl", tmp_path / "rows.json"
    lines.write_text(f'{{"q": "fine"}}\n{text}\n', encoding="utf-8")
    whole.write_text(f'[{{"q": "fine"}}, {text}]', encoding="utf-8")
    # Python itself reads no deeper text, and does not say where it gave up.
    row = "" if len(text) > 100_000 else ", row 1"
    for path, place in ((lines, f"train ({lines}), line 2 "), (whole, f"train ({whole}){row} ")):
        with pytest.raises(DataError, match=message) as caught:
            read_rows(path, "train")
        assert str(caught.value).startswith(place)
        assert len(str(caught.value).encode()) < 500  # it can be printed


def test_deep_rows_many_rows_and_whole_characters_are_read(tmp_path):
    path = tmp_path / "rows.json"
    many = [{"q": [[n]]} for n in range(500)]
    for rows in (f"[{deep(MOST_LEVELS)}]", json.dumps(many), '[{"q": "\\ud83d\\ude00"}]'):
        path.write_text(rows)
        assert read_rows(path) == json.loads(rows)


def test_columns_without_a_name_are_left_out(tmp_path):
    path = tmp_path / "rows.csv"
    pd.DataFrame(ROWS).to_csv(path)  # with its index
    assert read_rows(path) == ROWS
    path.write_text("a,b,\n1,2,\n")
    assert read_rows(path) == [{"a": "1", "b": "2"}]


def compressed(path):
    """Parquet of 1 MB, with a text of 1 MB in each of 1,000 rows."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import ParquetWriter

    texts = pyarrow.table({"question": ["x" * 1_000_000] * 50})
    with ParquetWriter(path, texts.schema) as writer:
        for _ in range(20):
            writer.write_table(texts)


def repeated(path):
    """Parquet of 100 kB: the same, in a column of numbers of a list of texts."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    texts = pyarrow.DictionaryArray.from_arrays([0] * 3000, ["x" * 1_000_000])
    write_table(pyarrow.table({"question": texts}), path)


def holes(path):
    with path.open("wb") as file:
        file.truncate(10**12)


def small_values(path):
    path.write_text("[" + "[]," * 1_000_000 + "[]]")


def empty_rows(path):
    path.write_text("{}\n" * 400_000)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("make", "ending"),
    [
        (compressed, "parquet"), (repeated, "parquet"), (holes, "jsonl"), (small_values, "json"),
        (empty_rows, "jsonl"),
    ],
)  # fmt: skip
def test_a_file_that_unfolds_beyond_the_limit_is_refused_in_bounded_memory(tmp_path, make, ending):
    path = tmp_path / f"rows.{ending}"
    make(path)
    code = (
        "import re\n"
        "from pathlib import Path\n"
        "from evo_grpo.envs.data.tables import read_rows\n"
        "from evo_grpo.errors import DataError\n"
        "try:\n"
        f"    read_rows({str(path)!r}, 'train', 0.02)\n"
        "except DataError as error:\n"
        "    print(error)\n"
        "peak = re.search(r'VmHWM:\\s*(\\d+) kB', Path('/proc/self/status').read_text())\n"
        "assert int(peak[1]) < 4 * 10**5, peak[0]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "at most 0.02 GB in memory, got more; give" in done.stdout


def test_pipes_devices_and_folders_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    (tmp_path / "rows.csv").symlink_to("/dev/zero")
    (tmp_path / "rows.json").mkdir()
    for name, got in (
        ("rows.jsonl", "a pipe, a"),
        ("rows.csv", "a pipe, a"),
        ("rows.json", "a fo"),
    ):
        with pytest.raises(DataError, match=f"expected a regular file .* got {got}"):
            read_rows(tmp_path / name)


def test_values_of_parquet_that_python_cannot_hold_are_named_with_their_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    path = tmp_path / "rows.parquet"
    times = pyarrow.array([0, 2**62], pyarrow.timestamp("ms"))
    torn = pyarrow.StringArray.from_buffers(
        1, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")
    )
    for column, rows in ((times, "rows 0 to 1"), (torn, "rows 0 to 0")):
        write_table(pyarrow.table({"a": column}), path)
        with pytest.raises(DataError, match=rf"{rows}: .*values that Python can hold: .*;"):
            read_rows(path)
    write_table(pyarrow.table([times, times], ["a", "a"]), path)
    with pytest.raises(DataError, match='expected each column once, got "a" twice'):
        read_rows(path)


def test_a_row_has_the_line_in_which_it_begins(tmp_path):
    (tmp_path / "a.csv").write_text('question,answer\n"two\nlines",1\n\nx,2\n"y\n\n",3\n')
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    (tmp_path / "a.json").write_text('[{"a": 1}, {"a": 2}]')
    csv, jsonl, whole = (
        [row.place for row in read_rows(tmp_path / f"a.{ending}", "train")]
        for ending in ("csv", "jsonl", "json")
    )
    assert [place.rpartition(", ")[2] for place in csv] == ["line 2", "line 5", "line 6"]
    assert jsonl[1] == f"train ({tmp_path / 'a.jsonl'}), line 3"
    assert whole[1].endswith("a.json), row 1")
    divided = divide(read_rows(tmp_path / "a.jsonl"), {"x": 1, "y": 1}, str, 0)
    copies = pickle.loads(pickle.dumps(divided))
    assert {r.place for rows in copies.values() for r in rows} == {
        f"dataset ({tmp_path / 'a.jsonl'}), line {line}" for line in (1, 3)
    }
