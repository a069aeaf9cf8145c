import json
import os
import pickle
import subprocess
import sys

import pandas as pd
import pytest

from evo_grpo.envs.data.dataset import divide
from evo_grpo.envs.data.tables import MOST_LEVELS, read_rows, require_columns
from evo_grpo.errors import DataError

ROWS = [{"question": "1+1=", "answer": "002"}, {"question": "a,b\n?", "answer": "é"}]


def write_csv(path):
    path.write_text('question,answer\n1+1=,002\n"a,b\n?",é\n', encoding="utf-8")


def write_tsv(path):
    path.write_text('question\tanswer\n1+1=\t002\n"a,b\n?"\té\n', encoding="utf-8")


def write_jsonl(path):
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n", encoding="utf-8")


def write_json(path):
    path.write_text(json.dumps(ROWS, ensure_ascii=False), encoding="utf-8")


def write_parquet(path):
    pd.DataFrame(ROWS).to_parquet(path)


WRITERS = {
    "csv": write_csv,
    "tsv": write_tsv,
    "jsonl": write_jsonl,
    "json": write_json,
    "parquet": write_parquet,
}


@pytest.mark.parametrize("ending", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, ending):
    path = tmp_path / f"rows.{ending}"
    WRITERS[ending](path)
    assert read_rows(path) == ROWS
    assert read_rows(str(path)) == ROWS


def test_lists_frames_and_datasets_give_rows():
    datasets = pytest.importorskip("datasets")
    assert read_rows(ROWS) == ROWS
    assert read_rows(pd.DataFrame(ROWS)) == ROWS
    assert read_rows(datasets.Dataset.from_list(ROWS)) == ROWS


def test_numbers_of_a_frame_are_pythons_own_and_missing_values_are_none():
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", None], "c": [0.5, float("nan")]})
    rows = read_rows(frame)
    assert rows == [{"a": 1, "b": "x", "c": 0.5}, {"a": 2, "b": None, "c": None}]
    assert type(rows[0]["a"]) is int


def test_the_source_is_not_shared():
    source = [{"question": "x"}]
    read_rows(source)[0]["question"] = "y"
    assert source == [{"question": "x"}]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "train: expected at least one row, got an empty dataset"),
        (pd.DataFrame({"a": []}), "train: expected at least one row"),
        (["a"], "train, row 0: expected a mapping of column to value, got str 'a'"),
        (
            {"train": [1], "test": [2]},
            'got a mapping with the keys test, train.*dataset\\["train"\\]',
        ),
        (iter([{"a": 1}]), "expected a datasets.Dataset, a list of dicts.*got list_iterator"),
        (7, "got int"),
        ("nowhere.csv", "train: no file 'nowhere.csv'.*named owner/name"),
        ("openai/gsm8k.csv", "train: no file 'openai/gsm8k.csv'"),
    ],
)
def test_what_is_no_table_is_named(source, message):
    with pytest.raises(DataError, match=message) as caught:
        read_rows(source, "train")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.csv", "question,answer\n", r"train: expected at least one row in '.*a.csv', got none"),
        ("a.jsonl", "", r"at least one row in '.*a.jsonl', got none"),
        ("a.json", "[]", r"at least one row in '.*a.json', got none"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "line 2 of .* is not JSON"),
        ("a.jsonl", "[1]\n", r"^train \(.*a.jsonl\), line 1: expected a mapping"),
        ("a.json", '{"a": 1}', "list of objects, got dict; one object per line"),
        ("a.json", "{", "is not JSON"),
        ("a.csv", "a,b\n1,2,3\n", "line 2 of .* more or fewer values than the header"),
        ("a.csv", "a,b\n1\n", "line 2 of .* more or fewer values than the header"),
        ("a.parquet", "not parquet", "is not a Parquet file"),
        ("a.txt", "x", r"ending in .csv, .json, .jsonl, .parquet, .tsv, got the ending '.txt'"),
    ],
)
def test_a_broken_file_is_named(tmp_path, file, content, message):
    path = tmp_path / file
    path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        read_rows(path, "train")
    assert "train" in str(caught.value)


def test_a_file_of_another_encoding_and_a_folder_are_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"question\n\xff\xfe\n")
    with pytest.raises(DataError, match="as UTF-8 text"):
        read_rows(path)
    folder = tmp_path / "b.csv"
    folder.mkdir()
    with pytest.raises(DataError, match="got a folder"):
        read_rows(folder)


def test_a_file_that_can_have_no_such_name_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("~nobody-of-this-name/a.csv", "x" * 5000 + ".csv", "a\0b.csv"):
        with pytest.raises(DataError, match="train: no file") as caught:
            read_rows(path, "train")
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_field_of_a_csv_may_be_of_any_length(tmp_path, ending):
    path = tmp_path / f"rows.{ending}"
    separator = "\t" if ending == "tsv" else ","
    text = "é" * 400_000
    path.write_text(f'question{separator}answer\n"{text}"{separator}2\n', encoding="utf-8")
    assert read_rows(path) == [{"question": text, "answer": "2"}]


@pytest.mark.parametrize("ending", WRITERS)
def test_a_byte_order_mark_is_no_part_of_a_row(tmp_path, ending):
    path = tmp_path / f"rows.{ending}"
    WRITERS[ending](path)
    if ending != "parquet":
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_rows(path) == ROWS


def test_a_null_character_is_a_character(tmp_path):
    for ending, text in (("csv", "q\na\0b\n"), ("jsonl", '{"q": "a\\u0000b"}\n')):
        path = tmp_path / f"rows.{ending}"
        path.write_text(text)
        assert read_rows(path) == [{"q": "a\0b"}]


def test_a_missing_column_is_named_with_the_nearest_one():
    with pytest.raises(DataError) as caught:
        require_columns(ROWS, {"qestion": "the prompt template"}, "train")
    assert str(caught.value) == (
        'train, row 0: no column "qestion", which the prompt template needs. '
        'Did you mean "question"? Columns of the row: answer, question'
    )


def test_a_column_missing_in_a_later_row_is_found():
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
    keys = {name: {row["q"] for row in part} for name, part in divided.items()}
    assert {name: len(part) for name, part in keys.items()} == {
        "train": 5,
        "validation": 1,
        "test": 1,
    }
    assert set.union(*keys.values()) == set(range(7))
    assert sum(map(len, divided.values())) == 50


def test_divide_needs_a_key_per_split():
    with pytest.raises(DataError, match="2 rows with 1 different prompts cannot be divided"):
        divide([{"q": 1}] * 2, {"train": 1, "test": 1}, lambda row: str(row["q"]), seed=0)


# --- JSON that Python itself reads badly, or not at all -----------------------------------------


def deep(levels):
    return '{"a": ' * (levels - 1) + "[" + "]" + "}" * (levels - 1)


@pytest.fixture
def refused(tmp_path):
    """`refused(text)`: the messages for a second line, and a second row, that must not pass."""

    def messages(text):
        lines, whole = tmp_path / "rows.jsonl", tmp_path / "rows.json"
        lines.write_text(f'{{"q": "fine"}}\n{text}\n', encoding="utf-8")
        whole.write_text(f'[{{"q": "fine"}}, {text}]', encoding="utf-8")
        found = []
        for path in (lines, whole):
            with pytest.raises(DataError) as caught:
                read_rows(path, "train")
            found.append(str(caught.value))
            assert len(found[-1]) < 500
        assert found[0].startswith(f"train: line 2 of {str(lines)!r} ")
        assert found[1].startswith("train: ")
        assert repr(str(whole)) in found[1]
        return found

    return messages


@pytest.mark.parametrize("levels", [MOST_LEVELS + 1, 900, 100_000])
def test_a_row_that_is_nested_too_deep_is_named_with_its_line(refused, levels):
    for message in refused(deep(levels)):
        assert "is nested too deep: expected at most 200 lists and objects within" in message


def test_a_row_of_200_levels_is_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(deep(MOST_LEVELS))
    assert read_rows(path) == [json.loads(deep(MOST_LEVELS))]


@pytest.mark.parametrize(
    "row", ['{"q": "a\\ud800b"}', '{"q": {"b": ["\\uDC80"]}}', '{"\\udfff": 1}', '["\\ud83d"]']
)
def test_half_a_character_is_named_with_its_line(refused, row):
    for message in refused(row):
        assert "has a string with half a character (a lone surrogate): '" in message
        message.encode()  # it can be printed


def test_two_halves_are_one_character(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "\\ud83d\\ude00"}\n')
    assert read_rows(path) == [{"q": "\U0001f600"}]


def test_an_integer_that_python_does_not_read_is_named_with_its_line(refused):
    for message in refused('{"q": ' + "1" * 5000 + "}"):
        assert "cannot be read: Exceeds the limit (4300 digits)" in message


def test_many_rows_are_not_deep(tmp_path):
    path = tmp_path / "rows.json"
    rows = [{"q": [[n]]} for n in range(500)]
    path.write_text(json.dumps(rows))
    assert read_rows(path) == rows


def test_the_index_that_pandas_writes_is_left_out(tmp_path):
    path = tmp_path / "rows.csv"
    pd.DataFrame(ROWS).to_csv(path)
    assert read_rows(path) == ROWS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b,a\n1,2,3\n", 'the header of .*: expected each column once, got "a" twice; rename'),
        ("a,,b\n1,2,3\n", "expected a name for every column, got none for column 2; name it"),
        ("a,b,\n1,2,\n", "got none for column 3"),
        (",b,\n1,2,3\n", "got none for column 3"),
    ],
)
def test_a_header_that_names_a_column_twice_or_not_at_all_is_refused(tmp_path, content, message):
    path = tmp_path / "rows.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_rows(path, "train")


def test_columns_of_objects_are_named_once_and_by_strings():
    frame = pd.DataFrame([[1, 2]], columns=["a", "a"])
    with pytest.raises(DataError, match='train: the frame: expected each column once, got "a"'):
        read_rows(frame, "train")
    with pytest.raises(
        DataError, match=r"train, row 0: expected strings as names .* got 0; rename"
    ):
        read_rows(pd.DataFrame([[1]]), "train")


def compressed(folder):
    """Parquet of 3 MB, with a text of 1 MB in each of 3,000 rows."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import ParquetWriter

    texts = pyarrow.table({"question": ["x" * 1_000_000] * 50})
    with ParquetWriter(folder / "rows.parquet", texts.schema) as writer:
        for _ in range(60):
            writer.write_table(texts)
    return folder / "rows.parquet"


def repeated(folder):
    """Parquet of 100 kB: the same, in a column of numbers of a list of texts."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    texts = pyarrow.DictionaryArray.from_arrays([0] * 3000, ["x" * 1_000_000])
    write_table(pyarrow.table({"question": texts}), folder / "rows.parquet")
    return folder / "rows.parquet"


def holes(folder):
    path = folder / "rows.jsonl"
    with path.open("wb") as file:
        file.truncate(10**12)
    return path


def small_values(folder):
    path = folder / "rows.json"
    path.write_text("[" + "[]," * 5_000_000 + "[]]")
    return path


def empty_rows(folder):
    path = folder / "rows.jsonl"
    path.write_text("{}\n" * 5_000_000)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("make", [compressed, repeated, holes, small_values, empty_rows])
def test_a_file_that_unfolds_beyond_the_limit_is_refused_in_bounded_memory(tmp_path, make):
    path = make(tmp_path)
    code = (
        "import re, time\n"
        "from pathlib import Path\n"
        "from evo_grpo.envs.data.tables import read_rows\n"
        "from evo_grpo.errors import DataError\n"
        "start = time.process_time()\n"
        "try:\n"
        f"    read_rows({str(path)!r}, 'train', 0.25)\n"
        "except DataError as error:\n"
        "    print(error)\n"
        "assert time.process_time() - start < 20\n"
        "peak = re.search(r'VmHWM:\\s*(\\d+) kB', Path('/proc/self/status').read_text())\n"
        "assert int(peak[1]) < 10**6, peak[0]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = "got bytes of 0" if make is holes else "at most 0.25 GB in memory, got more; give"
    assert expected in done.stdout


def test_pipes_and_devices_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    (tmp_path / "rows.csv").symlink_to("/dev/zero")
    for name in ("rows.jsonl", "rows.csv"):
        with pytest.raises(DataError, match="expected a regular file, got a pipe, a device or"):
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
        with pytest.raises(DataError, match=rf"{rows}: expected values that Python can hold: .*;"):
            read_rows(path)
    write_table(pyarrow.table([times, times], ["a", "a"]), path)
    with pytest.raises(DataError, match='expected each column once, got "a" twice'):
        read_rows(path)


def test_a_row_has_the_line_in_which_it_begins(tmp_path):
    (tmp_path / "a.csv").write_text('question,answer\n"two\nlines",1\n\nx,2\n"y\n\n",3\n')
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    (tmp_path / "a.json").write_text('[{"a": 1}, {"a": 2}]')
    places = {
        name: [row.place for row in read_rows(tmp_path / name, "train")]
        for name in ("a.csv", "a.jsonl", "a.json")
    }
    assert [place.rpartition(", ")[2] for place in places["a.csv"]] == [
        "line 2",
        "line 5",
        "line 6",
    ]
    assert places["a.jsonl"][1] == f"train ({tmp_path / 'a.jsonl'}), line 3"
    assert places["a.json"][1].endswith("a.json), row 1")
    divided = divide(read_rows(tmp_path / "a.jsonl"), {"x": 1, "y": 1}, str, 0)
    copies = pickle.loads(pickle.dumps(divided))
    assert {r.place for rows in copies.values() for r in rows} == {
        f"dataset ({tmp_path / 'a.jsonl'}), line {line}" for line in (1, 3)
    }
